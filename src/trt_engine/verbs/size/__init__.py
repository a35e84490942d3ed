"""How many streams: doubling, peak, cliffs."""
