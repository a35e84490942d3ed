"""What this machine has, what works together, what to do: `doctor`."""
