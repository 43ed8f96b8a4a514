# The ways to work on Timeline; CI runs these same targets. `make` alone lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Where this is set, each process that a test starts would compile Timeline again: half its start.
unexport PYTHONDONTWRITEBYTECODE
# NumPy starts a thread per core for linear algebra, which nobody here uses. Each process that imports it pays for that.
export OPENBLAS_NUM_THREADS := 1

PY := .venv/bin/python
STAMP := .venv/.setup-done
WORKERS ?= 2
ARGS ?=
SEEDS ?= 2000
SEED ?=
# Seeds that `make check`, `make test` and `make prove` run, apart from what SEEDS asks of `make simulate`. The 1,000 of
# `make test` are others each day.
CHECK_SEEDS ?= 40
TEST_SEEDS ?= 1000
PROVE_SEEDS ?= 5000
FIRST_SEED ?= $(shell echo $$(($$(date +%s) / 86400 % 1000 * 1000)))
# How long `make fuzz` fuzzes, over all kinds of frame; `make prove` does it for PROVE_FUZZ_SECONDS.
FUZZ_SECONDS ?= 3600
PROVE_FUZZ_SECONDS ?= 60

PYTEST := $(PY) -m pytest
DATA := tests/pipeline/data/flights_2013.parquet
PARALLEL := -n $(WORKERS) --dist worksteal
# Tests of servers and processes wait much of their time: twice as many workers as cores. Those of `make prove` alone
# fill the cores, and so have a worker for each.
GROUPED := -n $$((2 * $(WORKERS))) --dist loadscope --no-loadscope-reorder

.PHONY: help setup check static services test prove run pipeline bench faults simulate fuzz docs schema format clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  Options: make run ARGS="--speed 6000 --json"    make simulate SEEDS=500 | SEED=17    make check WORKERS=4'

setup: $(STAMP) ## Create .venv with everything in it (again only when pyproject.toml or constraints.txt change)
	@echo "set up: .venv has what pyproject.toml and constraints.txt ask for" >&2

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh
	@scripts/setup.sh $(STAMP)

check: static ## Style, types, layers, links, fast tests and 40 simulation seeds; a minute
	@scripts/tests.sh $(CHECK_SEEDS) 0 -q $(PARALLEL) -m "not slow and not processes and not servers and not prove"

static: $(STAMP) ## The part of `make check` that runs no test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PY) scripts/check_links.py

test: static services ## What a contributor needs and CI runs, on real servers: 15 to 20 minutes on two cores
	@scripts/tests.sh $(TEST_SEEDS) $(FIRST_SEED) $(GROUPED) -m "not prove"

prove: static services ## Everything there is: every store variant, long faults, 5,000 simulation seeds, fuzzing
	$(PY) -m tests.fuzz --seconds $(PROVE_FUZZ_SECONDS)
	@scripts/tests.sh $(PROVE_SEEDS) 0 -n $(WORKERS) --dist loadscope --no-loadscope-reorder

services: ## Install the servers that tests start (root), or say which are missing
	@scripts/services.sh

run: $(STAMP) ## The demo: a day of departures goes out on time (options in ARGS; CLUSTER=1: two brokers, one is killed)
	@$(if $(CLUSTER),scripts/services.sh etcd redis-server)
	@.venv/bin/timeline demo $(if $(CLUSTER),--cluster,) $(ARGS)

pipeline: $(STAMP) ## A year of departures through the pipeline, every one accounted for (ARGS="--into FOLDER" keeps it)
	@scripts/services.sh java
	@.venv/bin/timeline pipeline year $(DATA) $(ARGS)

bench: $(STAMP) ## Measure speed and lateness on this machine (options in ARGS; PLOT=1 draws the plots of design-docs/)
	@.venv/bin/timeline bench $(if $(PLOT),plot --into design-docs,) $(ARGS)

faults: $(STAMP) services ## Kill, stop and drain real processes under load
	$(PYTEST) -m processes tests/faults

simulate: $(STAMP) ## Deterministic simulation: SEEDS=2000 of them, or one alone with SEED=17
	$(PY) -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

fuzz: $(STAMP) ## Fuzz the wire's decoder with atheris, FUZZ_SECONDS=3600 over all kinds of frame
	$(PY) -m tests.fuzz --seconds $(FUZZ_SECONDS) $(ARGS)

docs: $(STAMP) ## Build the documentation site into build/docs; warnings are errors
	$(PY) scripts/stores_page.py
	$(PY) scripts/reference_pages.py
	$(PY) scripts/check_links.py
	$(PY) -m sphinx -q -n -W --keep-going -c docs -d build/doctrees . build/docs
	@echo "build/docs/index.html"

schema: $(STAMP) ## Regenerate the wire code from schemas/fbs/timeline.fbs (needs flatc)
	scripts/schema.sh

format: $(STAMP) ## Put the code into ruff's format, and fix what ruff can fix
	.venv/bin/ruff check --fix-only .
	.venv/bin/ruff format .

clean: ## Remove .venv, caches and built packages
	rm -rf .venv .fuzz build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
