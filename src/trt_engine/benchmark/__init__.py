"""Measuring: the closed loop, stability, logs in trtexec's shape, and a child process that may run out of memory."""
