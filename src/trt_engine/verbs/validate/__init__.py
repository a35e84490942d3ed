"""The verb `validate`."""
