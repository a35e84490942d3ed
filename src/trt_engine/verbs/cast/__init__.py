"""The verb `cast`."""
