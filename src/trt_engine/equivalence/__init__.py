"""Whether two models give the same outputs: one comparison, channel by channel, and the tolerance of each format."""
