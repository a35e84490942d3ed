"""The verb `evaluate`."""
