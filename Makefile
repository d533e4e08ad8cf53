# The commands of this project.  `make demo` and `make test` need Python 3.11+ and make, nothing else.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# A machine with a GPU often has its own Python with torch and CuPy in it: make gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
PROMPT ?= Why is the sky blue?

.PHONY: demo test check format gpu sanitize bench docs clean setup

$(VENV)/.runtime: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.dev: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,cuda13]"
	@touch $@ $(VENV)/.runtime

setup: $(VENV)/.dev

demo: $(VENV)/.runtime          ## a real model answers a prompt, through captured graphs
	$(BIN)/ostinato generate "$(PROMPT)" --max-tokens 64

test: $(VENV)/.dev              ## all tests that need no GPU, with coverage
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term:skip-covered $(ARGS)

check: $(VENV)/.dev             ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.dev              ## docs/cli.md from the --help texts, and the pictures
	$(BIN)/python tools/make_docs.py

gpu:                            ## the GPU and contract tests; a missing GPU is a failure
	PYTHONPATH=src $(GPU_PYTHON) -m pytest --require-gpu -m "gpu" -p no:cacheprovider $(ARGS)

SANITIZER = PYTHONPATH=src compute-sanitizer --error-exitcode 9 --report-api-errors no
SANITIZED = --require-gpu -m gpu -q -p no:cacheprovider --timeout 300

sanitize:                       ## compute-sanitizer: memcheck over the drivers' tests; the kernels by all tools
	$(SANITIZER) --tool memcheck $(GPU_PYTHON) -m pytest $(SANITIZED) \
	    tests/contract tests/graph tests/state tests/replay tests/cache tests/test_footguns.py
	$(SANITIZER) --tool memcheck $(GPU_PYTHON) -m pytest $(SANITIZED) \
	    tests/models/test_kernels_cuda.py -k "group"
	$(SANITIZER) --tool racecheck $(GPU_PYTHON) -m pytest $(SANITIZED) \
	    tests/models/test_kernels_cuda.py -k "group"
	$(SANITIZER) --tool initcheck $(GPU_PYTHON) -m pytest $(SANITIZED) \
	    tests/models/test_kernels_cuda.py -k "group"

bench:                          ## benchmarks on this machine; results under benchmarks/results
	PYTHONPATH=src $(GPU_PYTHON) -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
