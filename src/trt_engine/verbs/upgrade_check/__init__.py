"""The verb `upgrade-check`."""
