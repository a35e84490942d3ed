"""What we know about ONNX files: open them safely, read them, count them, find trouble in them."""
