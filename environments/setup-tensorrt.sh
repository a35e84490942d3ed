#!/bin/sh
# Puts one pinned TensorRT into the active environment and proves that it can be used.
#
#   sh setup-tensorrt.sh --list                         what is here already; changes nothing
#   sh setup-tensorrt.sh "tensorrt-cu13==11.4.0.106"    installs that, unless it is what is here
#
# TENSORRT_HOME names the folder of a TensorRT from a tar file (default: /usr/src/tensorrt, where NVIDIA's packages put trtexec).
set -eu

here() {
    python -c 'import tensorrt; print(tensorrt.__version__)' 2>/dev/null || true
}

same() {  # a release that one side tells in three parts and the other in four is the same
    [ -n "$1" ] || return 1
    case "$1." in "$2."*) return 0 ;; esac
    case "$2." in "$1."*) return 0 ;; esac
    return 1
}

find_trtexec() {
    command -v trtexec && return
    for place in "${TENSORRT_HOME:-/usr/src/tensorrt}/bin/trtexec" /opt/tensorrt/bin/trtexec /usr/local/tensorrt/bin/trtexec; do
        if [ -x "$place" ]; then
            echo "$place"
            return
        fi
    done
}

inventory() {
    found=$(here)
    echo "bindings: ${found:-none}"
    trtexec=$(find_trtexec || true)
    echo "trtexec: ${trtexec:-none (wheels do not bring it; the package libnvinfer-bin does)}"
    if command -v dpkg-query >/dev/null; then
        dpkg-query -W -f 'package: ${Package} ${Version}\n' 'libnvinfer*' 2>/dev/null || true
    fi
    if command -v ldconfig >/dev/null; then
        ldconfig -p 2>/dev/null | sed -n 's/^[[:space:]]*\(libnvinfer\.so[^ ]*\).*=> /library: \1 at /p'
    fi
}

if [ "$#" -ne 1 ]; then
    echo "usage: setup-tensorrt.sh --list | REQUIREMENT" >&2
    exit 2
fi
inventory
if [ "$1" = "--list" ]; then
    exit 0
fi

wanted=${1##*==}
if same "$(here)" "$wanted"; then
    echo "TensorRT $wanted is here already"
else
    python -m pip install "$1"
    now=$(here)
    if ! same "$now" "$wanted"; then
        echo "error: \`import tensorrt\` finds ${now:-nothing}, expected $wanted" >&2
        echo "hint: \`trt-engine doctor\` names the library that is missing, or the other TensorRT in the way" >&2
        exit 3
    fi
    echo "TensorRT $wanted is installed"
fi
