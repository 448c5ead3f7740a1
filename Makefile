PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
READY := .venv/.ready
# A file stays on one worker, so that its tests share what they have set up.
# Most tests wait for threads and processes more than they compute: two workers a core.
WORKERS ?= $(shell echo $$(( 2 * $$(getconf _NPROCESSORS_ONLN) )))

# Processes of tests read what others have compiled, also where the environment keeps Python from it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-gpu lint format types docs bench bench-network bench-network-full bench-chaos clean

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

demo: $(READY)
	$(BIN)/gossipgrad demo

test: $(READY) lint types
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# large models, networks of namespaces, a browser, storms, the pages; as root on Linux runs all
test-slow: $(READY)
	$(BIN)/python -m pytest -n auto --dist loadfile -m "slow and not gpu"

# on a machine with a CUDA device
test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

lint: $(READY)
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet

format: $(READY)
	$(BIN)/ruff format --quiet
	$(BIN)/ruff check --fix --quiet

types: $(READY)
	$(BIN)/pyrefly check --summary=none --python-interpreter-path $(BIN)/python

docs: $(READY)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build
	@echo docs/_build/index.html

bench: $(READY) .venv/.decent-dp
	$(BIN)/python -m benchmarks

# Linux and root; 20 minutes, and goes on where it was stopped
bench-network: $(READY) .venv/.decent-dp
	$(BIN)/python -m benchmarks.network --minutes 20

# hours; goes on where it was stopped
bench-network-full: $(READY) .venv/.decent-dp
	$(BIN)/python -m benchmarks.network --grid full

# half an hour; goes on where it was stopped. As root on Linux with faults of links, too
bench-chaos: $(READY)
	$(BIN)/python -m benchmarks.chaos

# a contestant; without its dependencies, that it may not choose a torch
.venv/.decent-dp: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps decent-dp==0.2.3 "loguru>=0.7.3,<1"
	touch $@

clean:
	rm -rf .venv build dist docs/_build .pytest_cache .ruff_cache .hypothesis
