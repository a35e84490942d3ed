# Sourced when an environment is activated: the loader and the shell find the TensorRT of this environment.

_trt_libs=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' 2>/dev/null || true)/tensorrt_libs
if [ -d "$_trt_libs" ]; then  # first, before a container's own: the one that wins must be the bindings' own
    export LD_LIBRARY_PATH="$_trt_libs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
if ! command -v trtexec >/dev/null && [ -x "${TENSORRT_HOME:-/usr/src/tensorrt}/bin/trtexec" ]; then
    export PATH="$PATH:${TENSORRT_HOME:-/usr/src/tensorrt}/bin"
fi
unset _trt_libs
