#!/bin/sh
# An environment with NVIDIA ModelOpt for the tests of `cast --autocast`, apart from ours: it patches ONNX Runtime in its
# process. The tests say so when it is not there.
#   tools/modelopt-venv.sh FOLDER PYTHON
set -u
folder=$1 python=$2
[ -e "$folder/.ready" ] && exit 0
{
	"$python" -m venv "$folder" &&
		"$folder/bin/python" -m pip install -q torch==2.13.0 &&
		"$folder/bin/python" -m pip install -q -e '.[quant]' &&
		touch "$folder/.ready"
} || echo "ModelOpt could not be installed: its tests will be skipped" >&2
exit 0
