"""The contents of a captured graph: its nodes and edges, as data, text and drawings."""
