"""What an engine shows of itself: the recorder, ranges for profilers, the environment."""
