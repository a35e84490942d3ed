"""The verb `infer`."""
