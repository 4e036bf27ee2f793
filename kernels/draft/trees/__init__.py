"""Draft trees: of a fixed shape, or grown by the drafts' probabilities."""
