"""PyTorch, exported programs, Hugging Face, timm and TensorFlow to ONNX, checked against their source."""
