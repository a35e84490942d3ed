"""Engines behind the Open Inference Protocol v2: repository, models, HTTP and gRPC servers, metrics."""
