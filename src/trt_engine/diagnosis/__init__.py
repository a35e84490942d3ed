"""What is installed here, what works together, and what to do about the rest."""
