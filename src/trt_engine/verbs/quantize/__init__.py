"""The verb `quantize`."""
