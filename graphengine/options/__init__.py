"""Options: their tables, the checks of their values, and values with a syntax of their own."""
