PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint format types docs bench clean

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

demo: $(READY)
	$(BIN)/gossipgrad demo

test: $(READY) lint types
	$(BIN)/python -m pytest -n auto

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

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build dist docs/_build .pytest_cache .ruff_cache .hypothesis
