"""Communication between ranks: all-reduces and gathers on sockets, mapped GPU memory or NCCL."""
