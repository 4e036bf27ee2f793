"""The core of an engine: its runtime on the device, the step loop, intake and delivery."""
