#!/bin/sh
# An environment with PyTorch, TensorFlow and Ray for the tests of `convert`, `batch` and `deploy ray`. The tests say so when it is not there.
#   tools/full-venv.sh FOLDER PYTHON
set -u
folder=$1 python=$2
[ -e "$folder/.ready" ] && exit 0
{
	"$python" -m venv "$folder" &&
		"$folder/bin/python" -m pip install -q --upgrade 'pip>=25.1' &&
		"$folder/bin/python" -m pip install -q torch==2.13.0 && # alone and first: what needs it would bring the CUDA build
		"$folder/bin/python" -m pip install -q -e '.[light,torch,simplify,tf,ray]' 'transformers>=4.57' --group dev &&
		touch "$folder/.ready"
} || echo "PyTorch, TensorFlow and Ray could not be installed: the tests of \`convert\`, \`batch\` and \`deploy ray\` will be skipped" >&2
exit 0
