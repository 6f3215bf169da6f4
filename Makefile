# Needs Python 3.11 or newer with venv, and make. Uses uv when it is there.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test check format build clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

install: $(INSTALLED) ## make the virtual environment, with all that the tests need

$(INSTALLED): pyproject.toml
	@if command -v uv >/dev/null 2>&1; then \
	    uv venv --quiet --allow-existing --python $(PYTHON) $(VENV) && \
	    uv pip install --quiet --python $(BIN)/python --editable . --group dev; \
	else \
	    $(PYTHON) -m venv $(VENV) && \
	    $(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1' && \
	    $(BIN)/python -m pip install --quiet --editable . --group dev; \
	fi
	@touch $@

demo: $(INSTALLED) ## enqueue some thousands of jobs on SQLite, and see what each way costs
	$(BIN)/python examples/demo.py

test: $(INSTALLED) ## run every test, on SQLite and on a Postgres that it starts itself
	$(BIN)/python -m pytest $(ARGS)

check: $(INSTALLED) ## formatting, lint and types of everything
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/basedpyright

format: $(INSTALLED) ## put the code into its format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

build: $(INSTALLED) ## build the wheel and the source archive into dist/
	$(BIN)/python -m build

clean: ## remove what the other targets made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
