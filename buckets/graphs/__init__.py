"""What a captured graph holds: its nodes and edges, as data, text and drawings."""
