# Everything a clone needs is Python 3.11 (or later), make and a package registry. `make help` lists the targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
# The locks were resolved for 3.11. The path is the program's own: a venv made through a link breaks with the link.
PYTHON ?= $(realpath $(shell command -v python3.11 || command -v python3))
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Exactly the files of a lock, whose digests it holds.
LOCKED := install --no-deps --require-hashes --requirement
# The tests that call programs of the host or compile; their skips are printed.
BARE_TESTS := tests/cli tests/cluster tests/engine/cpu_kernels tests/engine/cuda/test_graphs.py tests/hosts \
  tests/benchmarks/test_peer_venv.py tests/e2e/test_bundle.py
# The serving path without a model, a kernel or a cluster of processes.
QUICK_TESTS := tests/client tests/common tests/router tests/transfer tests/worker tests/cluster/planner \
  $(addprefix tests/engine/test_,block_pool.py core.py landing.py overlap.py step_timer.py)
MINUTES ?= 30
FUZZ_TARGETS ?= all
FUZZ_SECONDS ?= 600
# Clients of tests/foreign: packages that must not meet the project's own.
FOREIGN := .foreign
# Sets $python to the interpreter beside vLLM, or ends the recipe well where that cannot be had.
VLLM_PYTHON = python=$$($(BIN)/python -m benchmarks.peers) || { echo "skipped: there is no vLLM here" >&2; exit 0; }; \
  export PYTHONPATH="$(CURDIR)"
STEP := printf '==> %s\n'
# One line per package instead of pip's four; whatever else pip says, errors above all, stays.
BRIEF := 2>&1 | sed -u -E -e 's/^Collecting ([^ ]+).*/    \1/' -e 's/^(Installing collected packages).*/    installing/' \
  -e '/^(Looking in|Processing|Requirement already|Successfully installed|  (Using cached|Downloading|File was already))/d' \
  -e '/^ +(Attempting uninstall|Found existing installation|Uninstalling|Successfully uninstalled)/d' \
  -e '/^WARNING: Location .* is ignored/d'

.PHONY: help
help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

.PHONY: demo
demo: $(VENV)/.runtime ## Start a cluster, send it a handful of prompts, show what happened, stop it; MODEL_ENGINE=vllm
	@$(if $(filter vllm,$(MODEL_ENGINE)),$(VLLM_PYTHON) && "$$python" -m kvrelay demo --config deploy/vllm/serving.yaml,$(BIN)/kvrelay demo)

.PHONY: test
test: $(VENV)/.dev model ## Run the whole test suite (CPU, no running service)
	@.ci/test

.PHONY: test-vllm
test-vllm: $(VENV)/.dev model ## Test model.engine: vllm, in a virtual environment with vLLM's CPU build (3.5 GB, made once)
	@$(VLLM_PYTHON) && HF_HUB_OFFLINE=1 "$$python" -m pytest -q --durations 10 --durations-min 1 tests/vllm tests/transfer/test_nixl.py tests/worker/test_rank_endpoint.py

.PHONY: test-quick
test-quick: $(VENV)/.dev ## Run the fast tests of the serving path, for the inner loop
	@.ci/test -m "not e2e and not model" $(QUICK_TESTS)

.PHONY: test-bare
test-bare: $(VENV)/.dev ## Run the tests that use programs of the host, without compilers, ssh, rsync, git ...
	@.ci/bare-path .ci/test $(BARE_TESTS)

.PHONY: fuzz
fuzz: $(VENV)/.dev ## Fuzz every door, FUZZ_SECONDS (600) each; FUZZ_TARGETS names some of them
	@$(PIP) $(LOCKED) .ci/fuzz.lock --quiet --only-binary :all: \
	  || echo "there is no atheris for this platform: inputs are chosen by chance" >&2
	@$(BIN)/python -m tests.fuzz $(FUZZ_TARGETS) --seconds $(FUZZ_SECONDS)

.PHONY: gpu-ready
gpu-ready: $(VENV)/.dev ## Test what runs on a GPU with such a machine's versions (Python 3.12, torch 2.11); 2.5 GB to fetch, once
	@.ci/gpu-ready

.PHONY: torture
torture: $(VENV)/.dev ## Hurt the processes of a cluster for MINUTES (30) under load; SEED repeats a run; as root also cuts and a full disk
	@$(BIN)/python -m tests.torture --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

.PHONY: foreign
foreign: $(VENV)/.dev model $(FOREIGN)/.python $(FOREIGN)/.node ## Test other projects' clients (LiteLLM, LangChain ...) against clusters
	@KVRELAY_FOREIGN_PYTHON=$(FOREIGN)/venv/bin/python KVRELAY_FOREIGN_NODE=$(FOREIGN)/node .ci/test tests/foreign

.PHONY: check
check: $(VENV)/.dev ## Lint, types, import rules, protos, generated code
	@.ci/check

.PHONY: install
install: $(VENV)/.runtime ## Install what serving needs into .venv

.PHONY: install-dev
install-dev: $(VENV)/.dev ## Install what development needs too

.PHONY: model
model: $(VENV)/.runtime ## Fetch the default model, once
	@$(BIN)/python -m engine.default_model

.PHONY: lock
lock: $(VENV)/.dev ## Resolve pyproject.toml into the lock files again
	@.ci/lock

.PHONY: tables
tables: $(VENV)/.dev ## Write the tables of configuration keys and models in docs/ again
	@$(BIN)/python -m common.config.tables docs/serving.md docs/changes.md docs/engines.md
	@$(BIN)/python -m engine.model.tables docs/serving.md

.PHONY: docs
docs: ## Build the documents as a site in dist/site, every link checked
	@deploy/site/build

.PHONY: release
release: ## Make wheel, source distribution, SBOM and checksums in dist/
	@.ci/release

.PHONY: clean
clean: ## Remove .venv and caches; the fetched model stays
	rm -rf $(VENV) $(FOREIGN) .venv-genproto .venv-docs .venv-release .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(STEP) "making $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or later is needed; name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV)
	@touch $@

# torch comes first and by itself: which build is right depends on the machine.
$(VENV)/.runtime: requirements.lock pyproject.toml .ci/tools.lock .ci/install-torch | $(VENV)/.made
	@$(STEP) "installing what installs the rest"
	@$(PIP) $(LOCKED) .ci/tools.lock --progress-bar off $(BRIEF)
	@$(STEP) "installing torch"
	@$(BIN)/python .ci/install-torch
	@$(STEP) "installing $$(wc -l <requirements.lock) locked packages"
	@$(PIP) $(LOCKED) requirements.lock --progress-bar off $(BRIEF)
	@$(STEP) "installing kvrelay"
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: requirements-dev.lock $(VENV)/.runtime
	@$(STEP) "installing $$(wc -l <requirements-dev.lock) locked development packages"
	@$(PIP) $(LOCKED) requirements-dev.lock --progress-bar off $(BRIEF)
	@touch $@

$(FOREIGN)/.python: tests/foreign/requirements.txt
	@$(STEP) "installing clients for Python into $(FOREIGN)"
	@"$(PYTHON)" -m venv $(FOREIGN)/venv
	@$(FOREIGN)/venv/bin/python -m pip --disable-pip-version-check --no-input install --quiet --requirement $<
	@touch $@

$(FOREIGN)/.node: tests/foreign/package.json
	@mkdir -p $(FOREIGN)/node && cp $< $(FOREIGN)/node/
	@if command -v npm >/dev/null; then \
	  $(STEP) "installing clients for node into $(FOREIGN)"; \
	  npm install --prefix $(FOREIGN)/node --no-package-lock --no-audit --no-fund --silent && touch $@; \
	else echo "there is no npm: the clients for node are not tested" >&2; fi
