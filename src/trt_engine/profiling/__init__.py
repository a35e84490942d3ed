"""The time of an engine: layers, kernels, timelines, device peaks and the bottleneck."""
