"""The verb `pack`."""
