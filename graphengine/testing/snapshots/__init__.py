"""Golden files of captured graphs, and what differs from them."""
