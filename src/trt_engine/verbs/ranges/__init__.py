"""The verb `ranges`."""
