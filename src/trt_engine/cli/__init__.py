"""The command line: one module per verb, listed in the table in `main`."""
