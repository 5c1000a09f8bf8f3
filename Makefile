# One way to run each thing. Paths are relative, so a clone may live anywhere.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
STAMP := $(VENV)/.installed
WORKERS ?= logical

# Data sets beside the clone are read before anything is downloaded.
ifndef HOMEBODY_DATA
ifneq ($(wildcard ../shared/data),)
export HOMEBODY_DATA := $(CURDIR)/../shared/data
endif
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-faults test-random attack check bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP)  ## make .venv and install the package with its tools into it

PIP = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

$(CORE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "homebody needs Python 3.11 or newer; name one with: make PYTHON=python3.11")'
	@echo "Installing what the demo needs into $(VENV) …"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@touch $@

$(STAMP): $(CORE)
	@echo "Installing what tests and federations need …"
	$(PIP) -e '.[dev,deploy,serve]'
	@# A second opinion for one test: its auditing module alone is read, which needs no JAX.
	-$(PIP) --no-deps jax-privacy
	@touch $@

demo: $(CORE)  ## compare five recommenders on MovieLens-100K, one of them private
	$(BIN)/homebody compare popularity fedials fedmf pfedrec nearby --data ml-100k --seeds 1

# Compiled modules are kept, also where a shell says otherwise: every process would compile all of them again.
demo test test-fast test-faults test-random attack: export PYTHONDONTWRITEBYTECODE :=
# Workers already fill the cores: one thread of linear algebra each.
test test-fast test-faults test-random attack: export OMP_NUM_THREADS ?= 1
test test-fast test-faults test-random attack: export NUMBA_NUM_THREADS ?= 1
# A worker keeps to its part of the files, where tests share servers, and takes from the other's part when it is done.
PYTEST := $(BIN)/python -m pytest
PARALLEL := -n $(WORKERS) --maxprocesses=8 --dist worksteal

test: $(STAMP)  ## run all tests, doctests and the notebook (WORKERS=n, ARGS="-k name")
	$(PYTEST) $(PARALLEL) $(ARGS)

test-fast: $(STAMP)  ## the same without tests that start processes, or that draw very many numbers
	$(PYTEST) $(PARALLEL) -m "not processes and not slow and not faults and not attack" $(ARGS)

test-faults: $(STAMP)  ## kill processes, cut networks, fill a disk: nothing acknowledged is lost
	$(PYTEST) -m faults $(ARGS)

test-random: $(STAMP)  ## repeat every test that draws from the system (REPEAT=200)
	$(PYTEST) $(PARALLEL) -m random_draws --repeat $(or $(REPEAT),200) $(ARGS)

attack: $(STAMP)  ## run the long fuzzers and the kills, and count them (HOMEBODY_ATTACKS=0.01 for a short one, ARGS="-k name")
	$(PYTEST) -m attack tests/attacks $(ARGS)

check: $(STAMP)  ## lint, format, types, import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: $(STAMP)  ## measure speed and memory against the stated bars (ARGS="--megabytes 500": a smaller file)
	nice $(BIN)/python benchmarks/run.py $(ARGS)

clean:  ## remove .venv, builds and caches (never data or runs)
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +
