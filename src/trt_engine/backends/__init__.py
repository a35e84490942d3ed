"""One folder per backend: a card, a builder, a runtime."""
