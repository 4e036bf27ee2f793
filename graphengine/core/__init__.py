"""The core of an engine: its runtime on the device, the loop of a step, what goes in and out."""
