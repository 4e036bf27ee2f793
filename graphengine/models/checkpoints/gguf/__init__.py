"""Models in llama.cpp's file format: a file's metadata and tensors translated to a checkpoint's."""
