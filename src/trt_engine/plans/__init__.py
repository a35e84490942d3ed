"""What we know of TensorRT's plans without TensorRT: settings, versions, verdicts, causes, logs, layer information.

The native backend and the one that drives trtexec meet here; nothing in this folder imports `tensorrt`.
"""
