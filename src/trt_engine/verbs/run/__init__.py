"""Runs the cells of a plan in one run folder, and resumes them."""
