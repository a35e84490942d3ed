"""Declared pre- and post-processing: image to network input, network outputs to results."""
