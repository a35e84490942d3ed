"""The public functions: build, load, inspect, bench, ..."""
