"""The verb `example`."""
