# make run   sets up, trains PAX on built-in data, shows the result, and trains it through Flower too
# make test  sets up with the tools and torch, runs the tests on all cores
# make test-all also runs those marked slow: deployments, every method in Flower's simulation, every
#            step at which a server may die, further cases of many tests, other random examples
# make mutants plants the faults of tests/mutants.toml one by one; the default tests must find each
# make check sets up in the same way, runs ruff and mypy --strict, builds the documentation's pages
# make docs  sets up in the same way, builds the documentation with its gallery: docs/_build/html
# make first does what make run does after the setup, and make first-figures writes the local result
#            into README.md and the tutorial
# make lock  writes requirements.lock, what images install, of constraints.txt and the public index
#
# One file is tested sooner without workers: pytest tests/strategies/test_pax.py

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Touched when what the app needs is installed, and when all is.
READY := $(VENV)/.ready
READY_ALL := $(VENV)/.ready-all
# Twice quiet: errors only, not what pip warns of the machine.
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile
# uv installs in a quarter of pip's time, if it is there. For torch, which pip installs, it may take a
# CUDA build of gigabytes.
UV := $(shell command -v uv)
INSTALL := $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python,$(PIP))
# What both engines train by make run, and a folder for each.
FIRST := pax --data diabetes-clinics -c partition=column:clinic -c max-depth=3 -c num-boost-round=40
RUN = runs/first-$(shell date +%Y%m%d-%H%M%S)
# Ends well if both folders' models are the same.
COMPARE := import hashlib, pathlib, sys; files = [pathlib.Path(folder, "model.json") for folder in sys.argv[1:]]; \
digests = [hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files]; \
print("model by the local engine:", digests[0]), print("model by Flower:          ", digests[1]); \
sys.exit(digests[0] != digests[1] and "the models differ")
PAGES := $(BIN)/python -m sphinx -W --keep-going -q -b html
# More than 8 workers would wait for the tests that start Flower's servers, which one runs.
WORKERS := --numprocesses auto --maxprocesses 8
ALL := .[fedxgbllr,dev,docs]
PINS := pyproject.toml constraints.txt
# Tests start many processes; without bytecode each would compile the app, and pytest rewrite the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run first first-figures test test-all mutants check docs lock setup clean
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
	@$(PIP) --constraint constraints.txt torch
	@$(INSTALL) --constraint constraints.txt --editable '$(ALL)' || $(PIP) --constraint constraints.txt --editable '$(ALL)'
	@$(BIN)/python -m fedapp.runs.kernels
	@touch $(READY) $@

run: setup
	@$(MAKE) --no-print-directory first RUN=$(RUN)

first:
	$(BIN)/fedapp run $(FIRST) --baselines --output $(RUN)
	@echo "Now the same through Flower's runtime, which starts processes: up to a minute"
	$(BIN)/fedapp run $(FIRST) --engine simulation --output $(RUN)-flower
	@$(BIN)/python -c '$(COMPARE)' $(RUN) $(RUN)-flower

first-figures: $(READY_ALL)
	$(BIN)/python -m tests.docs.first

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
