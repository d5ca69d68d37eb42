# Every target sets up .venv by itself when it is missing or out of date.

PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready
PIP    := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: demo test lint verify rules coverage reference bench clean help

demo: $(READY)  ## train a small GPT on 8 simulated ranks, beside one device
	@$(BIN)/python examples/train.py --simulate 8

test: lint  ## lint, then all the tests; ARGS="-k mesh" narrows them
	@echo "== pytest"
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -q $(ARGS)

lint: $(READY)  ## style, types and layers
	@echo "== ruff"
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== import-linter"
	@$(BIN)/lint-imports --no-logo

verify: $(READY)  ## every rule against the one-device op, in some 20 minutes; ARGS="--quick", ARGS="--only norm"
	@$(BIN)/python -m shardwise.testing.verify $(ARGS)

rules: $(READY)  ## probe ops that have no rule, and write what is found to rules/generated.txt; ARGS="--only relu" prints
	@OMP_NUM_THREADS=1 $(BIN)/python -m shardwise.testing.generate $(ARGS)

coverage: $(READY)  ## PyTorch's operator database against one device, in some 15 minutes; ARGS="--quick", ARGS="--gloo"
	@OMP_NUM_THREADS=1 $(BIN)/python -m shardwise.testing.coverage $(ARGS)

reference: $(READY)  ## the same for torch.distributed.tensor, on four processes, in some 30 minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.testing.reference $(ARGS)

bench: $(READY)  ## run every script in benchmarks/
	@set -e; for script in $(sort $(wildcard benchmarks/*.py)); do \
	    echo "== $$script"; $(BIN)/python $$script; \
	done

clean:  ## remove caches and build output; .venv stays
	@rm -rf build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

$(READY): pyproject.toml constraints.txt
	@echo "== .venv (1/3): creating"
	@$(PYTHON) -m venv .venv
	@echo "== .venv (2/3): installing torch, the long one"
	@$(PIP) setuptools torch==2.13.0
	@echo "== .venv (3/3): installing shardwise and its tools"
	@$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@
