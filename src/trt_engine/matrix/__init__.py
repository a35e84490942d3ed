"""Many cells in one run folder: a plan read, carried out, gone on with."""
