"""Converts PyTorch, exported programs, Hugging Face, timm and TensorFlow models to ONNX, verified against the
source."""
