"""Models in llama.cpp's file format: what a file's metadata and tensors are in a checkpoint."""
