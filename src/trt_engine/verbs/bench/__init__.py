"""The verb `bench`."""
