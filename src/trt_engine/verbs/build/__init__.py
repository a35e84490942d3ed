"""The verb `build`."""
