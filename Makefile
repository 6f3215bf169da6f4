# Needs Python 3.11 or newer with venv, and make. Uses uv when it is there.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-oldest check format build clean

# The oldest version of each dependency that pyproject.toml allows, but of typing-extensions: pydantic wants it new.
OLDEST = import tomllib; \
    needed = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]; \
    print(*(each.replace(">=", "==") for each in needed if not each.startswith("typing")))

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

# Left out: Alembic before 1.18 sees differences in identity columns on SQLite where there are none.
test-oldest: ## the same with the oldest versions of the dependencies (not the type checkers)
	$(MAKE) install VENV=.venv-oldest
	.venv-oldest/bin/python -m pip --version >/dev/null 2>&1 || .venv-oldest/bin/python -m ensurepip
	.venv-oldest/bin/python -m pip install --quiet $$($(PYTHON) -c '$(OLDEST)')
	.venv-oldest/bin/python -m pytest --ignore tests/typing --ignore tests/test_packaging.py \
	    -k "not finds_no_difference and not own_alembic_environment" $(ARGS)

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
	rm -rf $(VENV) .venv-oldest build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
