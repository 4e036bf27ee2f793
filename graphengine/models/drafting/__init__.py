"""The layers of draft modules: MTP, EAGLE3 and block drafters, and how checkpoints have them."""
