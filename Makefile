# Every target creates or updates .venv when needed.

PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready
PIP    := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: demo test lint verify rules coverage fuzz reference compatibility bench clean help

demo: $(READY)  ## train a small GPT on 8 simulated ranks and compare it with one device
	@$(BIN)/python examples/train.py --simulate 8

test: lint  ## run lint and all tests; ARGS="-k mesh" selects tests
	@echo "== pytest"
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -q $(ARGS)

lint: $(READY)  ## check style, types and layers
	@echo "== ruff"
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== import-linter"
	@$(BIN)/lint-imports --no-logo

verify: $(READY)  ## compare every rule with the op on one device, about 20 minutes; ARGS="--quick", ARGS="--only norm"
	@$(BIN)/python -m shardwise.testing.verify $(ARGS)

rules: $(READY)  ## find rules of ops without one by probing; write them to ops/generated.txt; ARGS="--only relu" prints them
	@OMP_NUM_THREADS=1 $(BIN)/python -m shardwise.testing.generate $(ARGS)

coverage: $(READY)  ## compare PyTorch's operator database with one device, about 15 minutes; ARGS="--quick", ARGS="--gloo"
	@OMP_NUM_THREADS=1 $(BIN)/python -m shardwise.testing.coverage $(ARGS)

fuzz: $(READY)  ## compare 1,000 random programs with one device; ARGS="--programs 20000 --jobs 2", ARGS="--programs 300 --gloo"
	@OMP_NUM_THREADS=1 $(BIN)/python -m shardwise.testing.fuzz $(ARGS)

reference: $(READY)  ## the same for torch.distributed.tensor on four processes, about 30 minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.testing.reference $(ARGS)

compatibility: $(READY)  ## run programs for torch.distributed.tensor unmodified, about 15 minutes; writes docs/compatibility.md
	@$(BIN)/python -m tests.dropin.compatibility $(ARGS)

bench: $(READY)  ## run all benchmarks and update benchmarks/README.md
	@set -e; for script in $(sort $(wildcard benchmarks/*.py)); do \
	    echo "== $$script"; $(BIN)/python $$script; \
	done

clean:  ## remove caches and build output, but not .venv
	@rm -rf build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

help:  ## show this help
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

$(READY): pyproject.toml constraints.txt
	@echo "== .venv (1/3): creating"
	@$(PYTHON) -m venv .venv
	@echo "== .venv (2/3): installing torch, which takes longest"
	@$(PIP) setuptools torch==2.13.0
	@echo "== .venv (3/3): installing shardwise and its tools"
	@$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@
