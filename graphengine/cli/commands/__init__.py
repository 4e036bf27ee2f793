"""The commands of `graphengine`: a file for each."""
