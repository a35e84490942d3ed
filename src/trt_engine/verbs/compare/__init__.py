"""The verb `compare`."""
