"""Golden files of captured graphs, and differences from them."""
