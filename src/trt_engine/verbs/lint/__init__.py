"""The verb `lint`."""
