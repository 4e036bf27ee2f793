"""The checks of captured graphs that tests call: a file for each kind of fault."""
