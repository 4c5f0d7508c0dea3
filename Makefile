PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo test check format gpu-suite clean

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## / — /'

setup: .venv/ready  ## install everything into .venv

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/ready  ## raw log to trained model: make demo [DATA=criteo.tsv.gz] [JSON=summary.json]
	$(BIN)/hotbed demo $(DATA) $(if $(JSON),--json $(JSON))

test: .venv/ready  ## run the tests
	$(BIN)/python -m pytest -n auto

check: .venv/ready  ## lint, types, layers, public names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/test_public_names.py

format: .venv/ready  ## apply the formatter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu-suite: .venv/ready  ## correctness and bandwidth on a GPU (or tiny, under the interpreter)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash benchmarks/gpu_suite.sh

clean:  ## remove what setup and runs made
	rm -rf .venv runs
