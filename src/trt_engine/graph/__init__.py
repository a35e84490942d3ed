"""ONNX files: open them safely, inspect and edit them, and report problems."""
