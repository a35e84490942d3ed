"""Benchmarks: closed loop, stability, statistics, logs in trtexec's format, isolated child process."""
