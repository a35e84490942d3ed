"""The command line: one module per verb, found through the table in `main`."""
