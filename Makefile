# Everything is kept in .venv/ of the checkout; nothing else on the machine is touched.
# Needs Python 3.11 to 3.13 (with its venv module) and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
FUZZ_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test evaluate faults soak fuzz lint schemas wheel clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: $(VENV)/.demo ## Run the main job on an embedded broker and database, with real results
	@$(BIN)/anabranch demo

test: $(VENV)/.test ## Run every test
	$(BIN)/pytest --numprocesses 2 --dist loadfile $(PYTEST_ARGS)

evaluate: $(VENV)/.test ## Measure recall, access control, plans and ranking, each held to its bound
	@$(BIN)/python -m tests.evaluate

fuzz: $(VENV)/.test ## Send hostile messages to the decoder; FUZZ_ARGS="--inputs 1000000 --seed 7"
	@$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

faults: $(VENV)/.test ## Break everything around the workers under load, and account for every event
	@$(BIN)/python -m tests.faults

soak: $(VENV)/.soak ## Load one worker for half an hour with a fault each minute: nothing it holds may grow
	@$(BIN)/python -m tests.soak

lint: $(VENV)/.lint ## Check style, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

schemas: $(VENV)/.demo ## Derive the Avro schemas from the JSON contracts
	$(BIN)/anabranch contract derive

wheel: $(VENV)/.test ## Build the wheel into dist/
	$(BIN)/python -m build --wheel

clean: ## Remove the environment and everything that was built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "Anabranch needs Python 3.11 to 3.13; say which: make PYTHON=python3.12 …" >&2; exit 1; }
	@echo "Making $(VENV)/ and installing what is needed (once; about a minute) …"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo]'
	@touch $@

$(VENV)/.test: $(VENV)/.demo pyproject.toml
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group test
	@touch $@

$(VENV)/.soak: $(VENV)/.test pyproject.toml
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group soak
	@touch $@

$(VENV)/.lint: $(VENV)/.test pyproject.toml
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group lint
	@touch $@
