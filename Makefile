# Everything runs in .venv, which the first target that needs it sets up.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PORT ?= 8080
PROPERTIES ?= serving.properties
BIN := .venv/bin

.PHONY: help setup serve test check format docs clean

help:  ## Show the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: .venv/installed  ## Build .venv with the pinned versions of constraints.txt

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

serve: setup  ## Serve the demo model (PORT=8080 PROPERTIES=serving.properties)
	exec $(BIN)/python -m container serve --port $(PORT) --properties $(PROPERTIES)

test: setup  ## Run all tests (ARGS='tests/core -k stop' for some)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

check: setup  ## Lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup  ## Format the code and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup  ## Write docs/configuration.md from the option table
	$(BIN)/python -c "from container.report import markdown_lines; print(*markdown_lines(), sep='\n')" > docs/configuration.md

clean:  ## Remove .venv and caches
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis *.egg-info
