# make run   sets up, trains PAX on the built-in data through Flower, shows the result
# make test  sets up with the tools and torch, runs the tests on all cores
# make test-all also runs those marked slow: deployments, every method in Flower's simulation, every
#            step at which a server may die, further cases of many tests, other random examples
# make mutants plants the faults of tests/mutants.toml one by one; the default tests must find each
# make check sets up in the same way, runs ruff and mypy --strict, builds the documentation's pages
# make docs  sets up in the same way, builds the documentation with its gallery: docs/_build/html
# make lock  writes requirements.lock, what images install, of constraints.txt and the public index
#
# One file is tested sooner without workers: pytest tests/strategies/test_pax.py

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Touched when what the app needs is installed, and when all is.
READY := $(VENV)/.ready
READY_ALL := $(VENV)/.ready-all
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# uv installs in a quarter of pip's time, if it is there. For torch it may take a CUDA build of gigabytes.
UV := $(shell command -v uv)
INSTALL := $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python,$(PIP))
PAGES := $(BIN)/python -m sphinx -W --keep-going -q -b html
# More than 8 workers would wait for the tests that start Flower's servers, which one runs.
WORKERS := --numprocesses auto --maxprocesses 8
PINS := pyproject.toml constraints.txt
# Tests start many processes; without bytecode each would compile the app, and pytest rewrite the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-all mutants check docs lock setup clean
.DEFAULT_GOAL := run

setup: $(READY)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit("Python 3.11 to 3.13 is needed")'
	@$(PYTHON) -m venv $(VENV)

$(READY): $(PINS) | $(BIN)/python
	@echo "Setting up $(VENV): 1 GB of packages, a minute or so"
	@rm -rf fedapp.egg-info  # of an earlier version, which it would report
	@$(INSTALL) --constraint constraints.txt --editable . || $(PIP) --constraint constraints.txt --editable .
	@$(BIN)/python -m fedapp.runs.kernels
	@touch $@

$(READY_ALL): $(PINS) | $(BIN)/python
	@echo "Setting up $(VENV) for tests: with torch some 2 to 5 GB of packages, some minutes"
	@rm -rf fedapp.egg-info  # of an earlier version, which it would report
	@$(PIP) --constraint constraints.txt --editable '.[fedxgbllr,dev,docs]'
	@$(BIN)/python -m fedapp.runs.kernels
	@touch $(READY) $@

run: setup
	$(BIN)/fedapp run pax --baselines --engine simulation

test: $(READY_ALL)
	$(BIN)/python -m pytest $(WORKERS)

test-all: $(READY_ALL)
	$(BIN)/python -m pytest $(WORKERS) -m "" --hypothesis-profile random

mutants: $(READY_ALL)
	$(BIN)/python -m tests.mutants

check: $(READY_ALL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PAGES) -D plot_gallery=0 docs docs/_build/check

docs: $(READY_ALL)
	$(PAGES) docs docs/_build/html
	@echo "docs/_build/html/index.html"

lock: setup
	@{ echo "# What an image installs and builds the app with: versions of constraints.txt, SHA-256 of each"; \
	echo "# file that the public index has of them, for any platform and CPython 3.11 or later. By make lock."; \
	echo setuptools | $(BIN)/uv pip compile --quiet --no-header --no-annotate --generate-hashes \
	--universal --python-version 3.11 --constraint constraints.txt pyproject.toml -; \
	} > requirements.lock.new && mv requirements.lock.new requirements.lock

clean:
	rm -rf $(VENV)
