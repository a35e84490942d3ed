#!/bin/sh
# An environment with a real Triton Inference Server (that of nvidia-pytriton, under NVIDIA's licence) and this checkout, which
# its Python backend runs, for the tests that compare `serve` with it. The tests say so when it is not there.
#   tools/triton-venv.sh FOLDER PYTHON
set -u
folder=$1 python=$2
[ -e "$folder/.ready" ] && exit 0
{
	"$python" -m venv "$folder" &&
		"$folder/bin/python" -m pip install -q nvidia-pytriton==0.7.0 -e . &&
		"$folder/bin/python" - <<-'END' &&
			import pathlib, shutil, sys, pytriton
			server = pathlib.Path(pytriton.__file__).parent / "tritonserver"
			version = f"{sys.version_info.major}.{sys.version_info.minor}"
			stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
			shutil.copy(stub, server / "backends/python")
		END
		touch "$folder/.ready"
} || echo "Triton could not be installed: the tests against it will be skipped" >&2
exit 0
