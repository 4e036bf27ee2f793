"""Small engines, what tests ask of them, and how they are stepped."""
