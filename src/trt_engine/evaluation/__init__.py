"""Whether an engine computes what its model computes."""
