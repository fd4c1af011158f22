# Set-up and the two commands of this project. Everything lands in .venv and results; no GPU is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= configs/quickstart.yaml
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Every install passes the constraints: without them pip may take another build of torch. Bytecode of all
# packages is a minute's work; the first import compiles what is used.
INSTALL := $(PIP) install --no-compile -c constraints.txt
# So it is kept whatever is set here: without it hundreds of processes of the tests compiled torch anew, 3 s each.
unexport PYTHONDONTWRITEBYTECODE
# Processes that share the tests: one a core and one more, since many tests wait for processes of theirs; at most four.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
CHANGES := pyproject.toml constraints.txt

.PHONY: help sweep test lint types pytest clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

sweep: $(VENV)/installed ## set up, then compile, check and time the quickstart config; writes results/ and prints the report
	$(BIN)/gdntune sweep $(CONFIG)

test: lint ## set up, then lint, types and tests; what CI runs
	@$(MAKE) --no-print-directory -j2 types pytest

pytest: $(VENV)/installed-test ## the tests alone
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/installed-test ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-test ## mypy
	$(BIN)/mypy

clean: ## remove the environment, caches and build outputs, but no results
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(CHANGES) | $(BIN)/python
	@echo "setting up $(VENV): about a minute, 2 GB"
	$(INSTALL) -e '.[sweep,report]'
	@touch $@

$(VENV)/installed-test: $(CHANGES) | $(BIN)/python
	@echo "setting up $(VENV) with the tests' tools: about a minute, 2 GB"
	$(INSTALL) -e '.[test,dev]'
	@touch $(VENV)/installed $@
