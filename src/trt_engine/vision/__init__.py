"""Declared pre- and post-processing: what a picture becomes before the network, and what its outputs mean."""
