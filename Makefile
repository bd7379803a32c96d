# Everything is installed into .venv/ of the checkout (the benchmark's peers into .venv-peers/); nothing else on the machine
# is changed.
# Needs Python 3.11 to 3.13 (with its venv module) and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := requirements/development.txt
# The benchmark's peers need other versions than the project.
PEERS := .venv-peers
# pip verifies the hashes of constrained packages.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(PINS)
LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
  --custom-compile-command 'make lock'
PYTEST_ARGS ?=
# Most tests wait for servers more than they compute. A file's tests share a process and its servers.
PYTEST := $(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder
FUZZ_ARGS ?=
OPS_ARGS ?=
OBSERVABILITY_ARGS ?=
BENCH_ARGS ?=
# Every run reads all pages, because Sphinx does not repeat the warnings of cached pages.
SPHINX := $(BIN)/sphinx-build --conf-dir docs --doctree-dir build/doctrees --fresh-env --nitpicky --fail-on-warning

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-long evaluate bench bench-long gate faults ops soak fuzz lint docs docs-links schemas observability k8s-rules \
  wheel lock sbom clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: $(VENV)/.demo ## Run the worker on an embedded broker and database, with sample questions
	@$(BIN)/anabranch demo
	@echo "Before you type anabranch in this checkout: . $(BIN)/activate"

test: $(VENV)/.test ## Run all tests
	$(PYTEST) $(PYTEST_ARGS)

test-long: $(VENV)/.test ## Run all tests, also those marked as long, and each on both brokers
	$(PYTEST) --long $(PYTEST_ARGS)

test-fast: $(VENV)/.test ## Run the fast tests that need no server except PostgreSQL, in under two minutes
	$(PYTEST) --fast $(PYTEST_ARGS)

evaluate: $(VENV)/.test ## Measure recall, access control cost, plans and ranking, and check each against its bound
	@$(BIN)/python -m tests.evaluate

bench: $(VENV)/.soak $(PEERS)/.installed ## Measure throughput and latency beside the ceiling and other tools; BENCH_ARGS="--rounds 3"
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-long: $(VENV)/.soak ## Measure growth, a backlog and memory; takes about an hour
	@$(BIN)/python -m benchmarks.long $(BENCH_ARGS)

gate: $(VENV)/.test ## Fail if the worker falls below its recorded share of the ceiling; takes two minutes
	@$(BIN)/python -m benchmarks.gate $(BENCH_ARGS)

fuzz: $(VENV)/.test ## Fuzz the decoder; FUZZ_ARGS="--inputs 1000000 --seed 7"
	@$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

faults: $(VENV)/.test ## Inject faults around the workers under load, and account for every event
	@$(BIN)/python -m tests.faults

ops: $(VENV)/.test ## Run real faults under a real Prometheus, and check which alerts fire; takes half an hour
	@$(BIN)/python -m tests.ops $(OPS_ARGS)

soak: $(VENV)/.soak ## Load one worker for half an hour with a fault each minute, and check for leaks
	@$(BIN)/python -m tests.soak

lint: $(VENV)/.lint ## Check style, types and import directions
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.docs ## Build the documentation into build/docs/; fail on warnings and broken links
	@rm -rf build/docs
	@$(SPHINX) --quiet --builder html . build/docs
	@echo "build/docs/index.html"

docs-links: $(VENV)/.docs ## Check the external links of the documentation
	$(SPHINX) --builder linkcheck . build/docs-links

schemas: $(VENV)/.demo ## Derive the Avro schemas from the JSON contracts
	$(BIN)/anabranch contract derive

k8s-rules: ## Write the rules of Prometheus as a PrometheusRule for Kubernetes
	k8s/components/prometheusrule/generate > k8s/components/prometheusrule/prometheusrule.yaml

# It needs nothing but Python.
observability: ## Write Prometheus's rules and Grafana's dashboards; OBSERVABILITY_ARGS="--workers 4"
	@$(PYTHON) -m k8s.observability $(OBSERVABILITY_ARGS)

wheel: $(VENV)/.test ## Build the wheel into dist/
	$(BIN)/python -m build --wheel

clean: ## Remove the environment and all build output
	rm -rf $(VENV) $(PEERS) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

lock: $(VENV)/.lock ## Pin every dependency, with hashes, to the newest version that pyproject.toml allows
	$(LOCK) --upgrade --extra demo $(foreach group,build test soak lint docs lock,--group $(group)) --output-file $(PINS) pyproject.toml
	$(LOCK) --constraint $(PINS) --group build --output-file requirements/build.txt
	$(LOCK) --constraint $(PINS) --output-file requirements/runtime.txt pyproject.toml
	$(LOCK) --constraint $(PINS) --extra demo --output-file requirements/demo.txt pyproject.toml
	$(LOCK) --constraint $(PINS) --extra cohere --extra openai --extra local --output-file requirements/embedder.txt pyproject.toml
	$(LOCK) --upgrade --group bench --output-file requirements/bench.txt

sbom: $(VENV)/.demo ## Write the software bill of materials of a worker's dependencies to dist/
	@mkdir -p dist
	@$(BIN)/python requirements/sbom.py \
	  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" requirements/runtime.txt \
	  > dist/anabranch.cdx.json

$(VENV)/.python: requirements/build.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "Anabranch needs Python 3.11 to 3.13. Choose one: make PYTHON=python3.12 …" >&2; exit 1; }
	@echo "Creating $(VENV)/ and installing dependencies (once; about a minute) …"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements/build.txt
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml $(PINS)
	@$(INSTALL) --require-hashes --requirement requirements/demo.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.demo pyproject.toml
	@$(INSTALL) --group test
	@touch $@

$(VENV)/.soak: $(VENV)/.test pyproject.toml
	@$(INSTALL) --group soak
	@touch $@

$(PEERS)/.installed: $(VENV)/.python requirements/bench.txt
	@$(PYTHON) -m venv $(PEERS)
	@$(BIN)/python -m pip --python $(PEERS)/bin/python install --quiet --disable-pip-version-check --require-hashes \
	  --requirement requirements/bench.txt
	@touch $@

$(VENV)/.docs: $(VENV)/.python pyproject.toml $(PINS)
	@$(INSTALL) --group docs
	@touch $@

$(VENV)/.lock: $(VENV)/.python pyproject.toml
	@$(INSTALL) --group lock
	@touch $@

$(VENV)/.lint: $(VENV)/.test pyproject.toml
	@$(INSTALL) --group lint
	@touch $@
