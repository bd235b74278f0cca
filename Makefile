# Everything a machine with Python, and nothing else, needs: `make run` trains, `make test` proves.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
STRATEGY ?= ring_ddp
CONFIG ?= configs/gpt_tiny.yaml

.DEFAULT_GOAL := help

.PHONY: help setup run test slow exhaustive lint types check fix bench clean

help: ## Shows this list.
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(INSTALLED) ## Makes a virtual environment in .venv and installs the project into it.

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

run: $(INSTALLED) ## Trains CONFIG (a GPT on real text, 2 processes) under STRATEGY (ring_ddp).
	$(BIN)/stratagem fit --config $(CONFIG) --config configs/strategy/$(STRATEGY).yaml

test: $(INSTALLED) ## Runs the tests, but for those that take long.
	$(BIN)/python -m pytest -n 2 -m "not slow and not exhaustive"

slow: $(INSTALLED) ## Runs the long ones: cold processes, fresh environments, larger gangs of the contract.
	$(BIN)/python -m pytest -n 2 -m "slow and not exhaustive"

exhaustive: $(INSTALLED) ## Runs the rest of the contract: variants of our strategies, and DeepSpeed on 3 and 4 ranks.
	$(BIN)/python -m pytest -n 2 -m exhaustive

lint: $(INSTALLED) ## Style, and that imports point down only.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(INSTALLED) ## mypy, strict. The link is there because type checkers do not run the editable install's import hook.
	@mkdir -p .typing && ln -sfn ../src .typing/stratagem
	$(BIN)/mypy

check: lint types test slow ## All of it: what has to pass before a change lands.

fix: $(INSTALLED) ## Formats, and mends what can be mended by itself.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## Ratios against the peers: collectives, ring DDP, ZeRO, checkpoints; each in one run.
	$(BIN)/python examples/bench_collectives.py
	$(BIN)/python examples/bench_training.py
	$(BIN)/python examples/bench_zero.py
	$(BIN)/python examples/bench_checkpoint.py

clean: ## Removes what was built; leaves runs and the virtual environment.
	rm -rf build dist .typing .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info
