"""The Open Inference Protocol v2: its messages over gRPC, and tensors as both protocols send them."""
