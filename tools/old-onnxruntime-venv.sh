#!/bin/sh
# An environment with an older ONNX Runtime, for the test of `upgrade-check` on two versions. The test says so when it is
# not there.
#   tools/old-onnxruntime-venv.sh FOLDER PYTHON
set -u
folder=$1 python=$2
[ -e "$folder/.ready" ] && exit 0
{
	"$python" -m venv "$folder" &&
		"$folder/bin/python" -m pip install -q -e . onnxruntime==1.24.4 &&
		touch "$folder/.ready"
} || echo "ONNX Runtime 1.24.4 could not be installed: the test of two versions will be skipped" >&2
exit 0
