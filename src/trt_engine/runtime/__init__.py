"""An engine made to run: `instance` turns a session into the public `InferenceEngine`."""
