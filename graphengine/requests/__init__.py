"""What a request is, what it asks, and what comes of it."""
