"""What TensorRT 8 -> 10 -> 11 removed, renamed or gave another meaning, found in scripts, sources and configurations."""
