"""Where the time of an engine goes: layers, kernels, timelines, ceilings and the verdict drawn from them."""
