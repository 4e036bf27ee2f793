"""Products with a weight, and how they are cut."""
