"""graphengine: one decoding step is one CUDA graph replay."""
