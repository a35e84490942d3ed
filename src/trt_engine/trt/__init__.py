"""TensorRT plans without TensorRT: settings, versions, compatibility, failure causes, logs, layer information.

Shared by the native and the trtexec backend; nothing in this folder imports `tensorrt`.
"""
