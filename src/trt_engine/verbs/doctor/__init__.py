"""Diagnose the machine and the installation: `doctor`."""
