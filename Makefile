# Two commands do everything on a fresh machine: `make demo` and `make test`. Needed: Python 3.11+, make, a package index.

# The first interpreter that runs and is 3.11 or newer; `make PYTHON=...` overrules.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= runs/demo
PYTEST = $(BIN)/python -m pytest
# Three processes for two cores, as tests wait for children; each takes whole files while it can: what a file makes is made once.
SPREAD = -n 3 --dist worksteal
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Empty is not set: the tests start the command hundreds of times, and without bytecode each start compiles it again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help demo docs rtx test test-full test-installations test-tensorrt check format schemas setup setup-core clean

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

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install -q -e . --group docs
	@touch $@

setup-core: $(VENV)/.core  ## the command alone, in $(VENV)
setup: $(VENV)/.dev  ## everything a developer needs

demo: $(VENV)/.core  ## the main job: the example detector to an engine and a stream count
	$(BIN)/trt-engine size examples/digits/model.onnx -o $(DEMO) --overwrite

docs: $(VENV)/.docs  ## the documentation as a site that needs no network: site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html"

# TensorRT-RTX's parser and builder, 96 MB, under NVIDIA's licence; `make test RTX=0` does without.
RTX ?= 1
rtx: $(VENV)/.dev
	@[ "$(RTX)" = 0 ] || tools/rtx-wheels.sh $(BIN)/python

test: rtx  ## core and light extras, and TensorRT-RTX where NVIDIA has it; what needs more is skipped, said and counted
	$(PYTEST) $(SPREAD) -m 'not gpu and not slow'

# What needs PyTorch, TensorFlow or Ray runs in an environment of its own.
FULL = tests/backends/inductor tests/batch_jobs tests/contract tests/conversion tests/deployment/test_ray.py tests/fuzz tests/graph/test_module_paths.py tests/rtx/test_rtx_recipes.py \
	tests/runtime/test_other_processes.py tests/verbs/test_given_models.py

test-full: rtx  ## what `make test` leaves out and a CPU can run; installs a browser, shells, ModelOpt, PyTorch, TensorFlow and Ray where it may
	@tools/test-tools.sh $(BIN)/python
	@tools/full-venv.sh $(VENV)-full $(BIN)/python
	@tools/modelopt-venv.sh $(VENV)-modelopt $(BIN)/python
	@tools/triton-venv.sh $(VENV)-triton $(BIN)/python
	@$(MAKE) --no-print-directory test-installations SUBSET=1
	if [ -e $(VENV)-lowest/.ready ]; then export TRT_ENGINE_TEST_OLD_ONNXRUNTIME_PYTHON=$(abspath $(VENV)-lowest/bin/python); fi; \
		if [ -e $(VENV)-modelopt/.ready ]; then export TRT_ENGINE_TEST_MODELOPT_PYTHON=$(abspath $(VENV)-modelopt/bin/python); fi; \
		if [ -e $(VENV)-triton/.ready ]; then export TRT_ENGINE_TEST_TRITON_PYTHON=$(abspath $(VENV)-triton/bin/python); fi; \
		$(PYTEST) $(SPREAD) -m 'slow and not gpu'
	@[ "$(RTX)" = 0 ] || [ ! -e $(VENV)-full/.ready ] || tools/rtx-wheels.sh $(VENV)-full/bin/python
	if [ -e $(VENV)-full/.ready ]; then $(VENV)-full/bin/python -m pytest $(SPREAD) -m 'full and not gpu' $(FULL); fi

# `core` has no optional part. `lowest` has the lowest versions of pyproject.toml.
INSTALLATIONS = core lowest gpu-package python3.12 python3.13
# Every verb, and what differs between releases of libraries: sessions and bindings of ONNX Runtime, httptools' parser, gRPC, spans, options.
SMALL = tests/test_package.py tests/cli/test_help.py tests/cli/test_options.py tests/cli/test_imports.py tests/cli/test_install_hint.py \
	tests/runtime/test_bound_calls.py tests/backends/onnxruntime/test_onnxruntime_lifetimes.py tests/graph/test_lint.py \
	tests/serving/test_kserve.py tests/serving/test_tracing.py tests/examples/test_classifiers.py

test-installations: $(VENV)/.dev  ## `make test` in other installations; SUBSET=1: some of it
	tools/installations.sh $(VENV) $(BIN)/python "$(INSTALLATIONS)" $(SPREAD) -q -m 'not gpu and not slow' $(if $(SUBSET),$(SMALL))

test-tensorrt: $(VENV)/.dev  ## what only a machine with TensorRT and a GPU can show: the checklist of docs/tensorrt.md
	$(PYTEST) -v -m gpu tests/gpu/test_tensorrt_real.py tests/gpu/test_tensorrt_rtx_real.py tests/gpu/test_onnxruntime_rtx.py

check: $(VENV)/.dev  ## format, lint, types, layers, words, names in docstrings, budget
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/words.py --limit 40
	$(BIN)/python tools/docstrings.py --names
	$(BIN)/python tools/counts.py --check

format: $(VENV)/.dev  ## make `check`'s first two lines pass
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schemas: $(VENV)/.dev  ## docs/schemas/ from the record types, typed keyword arguments from config.py
	$(BIN)/python tools/schemas.py
	$(BIN)/python tools/settings_types.py

clean:  ## remove the environment and the demo's results
	rm -rf $(VENV) $(VENV)-modelopt $(VENV)-triton $(VENV)-full $(INSTALLATIONS:%=$(VENV)-%) $(DEMO) site
