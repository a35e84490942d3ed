"""The verb `docs`."""
