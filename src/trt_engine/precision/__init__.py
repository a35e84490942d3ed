"""Precision written into the graph and proved: formats, calibration, ranges."""
