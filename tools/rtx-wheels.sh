#!/bin/sh
# TensorRT-RTX in the environment of the tests, where NVIDIA has it: x86-64 Linux with glibc 2.28 or newer. Its licence is
# NVIDIA's: it is installed from the package index, and nothing of it is kept or packed.
# The tests say so, and count what they did not build, when it is not there.
#   tools/rtx-wheels.sh PYTHON
set -u
python=$1
[ "$(uname -sm)" = "Linux x86_64" ] || exit 0
"$python" - <<'END' || exit 0
import os, sys
name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
sys.exit(not (name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 28)))
END
# what the extra names, without building this package a second time
wheels=$("$python" - <<'END'
from importlib.metadata import requires
print(*(line.partition(";")[0].strip() for line in requires("trt-engine") or () if "extra == 'rtx'" in line))
END
)
# shellcheck disable=SC2086  # several requirements
"$python" -m pip install -q $wheels && "$python" -c 'import tensorrt_rtx' ||
	echo "TensorRT-RTX could not be installed: the tests of its parser and builder will be skipped and counted" >&2
exit 0
