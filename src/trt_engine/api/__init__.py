"""build(), load(), inspect() and bench(): where backends and runtime meet."""
