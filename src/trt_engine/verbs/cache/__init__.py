"""The verb `cache`."""
