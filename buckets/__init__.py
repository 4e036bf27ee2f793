"""Static buffers, bucket ladders and captured graphs for any step program."""
