# Two commands do everything on a fresh machine: `make demo` and `make test`. Needed: Python 3.11+, make, a package index.

# The first interpreter that runs and is 3.11 or newer; `make PYTHON=...` overrules.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= runs/demo
PYTEST = $(BIN)/python -m pytest
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test test-full test-tensorrt check format schemas setup setup-core clean

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found"; echo "hint: install one, or name it: make PYTHON=/path/to/python3.11"; exit 3; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install -q -e '.[light]' --group dev
	@touch $@ $(VENV)/.core

setup-core: $(VENV)/.core  ## the command alone, in $(VENV)
setup: $(VENV)/.dev  ## everything a developer needs

demo: $(VENV)/.core  ## the main job: the example detector to an engine and a stream count
	$(BIN)/trt-engine size examples/digits/model.onnx -o $(DEMO) --yes

test: $(VENV)/.dev  ## core and light extras; what needs more is skipped, said and counted
	$(PYTEST) -n 2 -m 'not gpu and not slow'

# What needs PyTorch or TensorFlow runs in an environment of its own.
FULL = tests/conversion tests/graph/test_module_paths.py

test-full: $(VENV)/.dev  ## all that runs on a CPU; installs a browser, shells, ModelOpt, PyTorch and TensorFlow where it may
	@tools/test-tools.sh
	@tools/full-venv.sh $(VENV)-full $(BIN)/python
	@tools/modelopt-venv.sh $(VENV)-modelopt $(BIN)/python
	if [ -e $(VENV)-modelopt/.ready ]; then export TRT_ENGINE_TEST_MODELOPT_PYTHON=$(abspath $(VENV)-modelopt/bin/python); fi; \
		$(PYTEST) -n 2 -m 'not gpu'
	if [ -e $(VENV)-full/.ready ]; then $(VENV)-full/bin/python -m pytest -n 2 -m 'full and not gpu' $(FULL); fi

test-tensorrt: $(VENV)/.dev  ## what only a machine with TensorRT and a GPU can show: the checklist of docs/tensorrt.md
	$(PYTEST) -v -m gpu tests/gpu/test_tensorrt_real.py

check: $(VENV)/.dev  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## make `check`'s first two lines pass
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schemas: $(VENV)/.dev  ## docs/schemas/ from the record types
	$(BIN)/python tools/schemas.py

clean:  ## remove the environment and the demo's results
	rm -rf $(VENV) $(VENV)-modelopt $(VENV)-full $(DEMO)
