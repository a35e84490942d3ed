"""Which layers may be quantised within an accuracy budget."""
