PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
# What is wrong is shown, and nothing else.
PIP := -m pip --disable-pip-version-check --quiet --quiet
STAGES := demo test doors docs check
# A file stays on one worker, so that its tests share what they have set up.
# Most tests wait for threads and processes more than they compute: three workers a core.
WORKERS ?= $(shell echo $$(( 3 * $$(getconf _NPROCESSORS_ONLN) )))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
# But beartype draws from `random` in threads of ours while Hypothesis looks.
STRICT := -W error -W "ignore:Do not use the"

# Processes of tests read what others have compiled, also where the environment keeps Python from it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test check test-slow test-gpu lint format types docs requirements
.PHONY: bench bench-network bench-network-full bench-chaos clean

demo: .venv/.demo
	$(BIN)/gossipgrad demo

test: .venv/.test
	$(PYTEST)

# what a change has to pass; warnings of all packages are errors here, and only here
check: lint types .venv/.test .venv/.doors .venv/.docs
	$(PYTEST) $(STRICT)
	$(PYTEST) $(STRICT) -m slow tests/test_pages.py

# large models, networks of namespaces, a browser, storms, the pages; as root on Linux runs all
test-slow: .venv/.test .venv/.doors .venv/.docs
	$(BIN)/python -m pytest -n auto --dist loadfile -m "slow and not gpu"

# on a machine with a CUDA device
test-gpu: .venv/.test
	$(BIN)/python -m pytest -m gpu

lint: .venv/.check
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet
	@imports=$$($(BIN)/lint-imports --no-cache --no-logo) || { echo "$$imports"; exit 1; }

format: .venv/.check
	$(BIN)/ruff format --quiet
	$(BIN)/ruff check --fix --quiet

types: .venv/.check
	$(BIN)/pyrefly check --summary=none --min-severity error --python-interpreter-path $(BIN)/python

docs: .venv/.docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build
	@echo docs/_build/index.html

# Set-up: a stage adds what its targets need, at the versions of requirements/. A torch that .venv
# has already is kept: all stages are held to the version that .venv/.torch names.
.venv/.torch:
	@echo "making .venv, with $(TORCH) if it has no torch"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -c "import torch" 2>/dev/null \
		|| $(BIN)/python $(PIP) install -c requirements/demo.txt "$(TORCH)" \
		|| { echo "$(TORCH) could not be installed; name another one by TORCH=, or another Python by PYTHON="; exit 1; }
	@$(BIN)/python -c "from importlib.metadata import version as v; print('torch==' + v('torch'))" >$@

.venv/.test: .venv/.demo
.venv/.demo .venv/.doors .venv/.docs .venv/.check: .venv/.torch
$(STAGES:%=.venv/.%): .venv/.%: requirements/%.txt pyproject.toml
	@echo "installing requirements/$*.txt into .venv"
	@$(BIN)/python $(PIP) install -c .venv/.torch $(STAGES:%=-c requirements/%.txt) --editable ".[$(subst demo,cli,$*)]" \
		|| { echo "requirements/$*.txt could not be installed"; exit 1; }
	@touch $@

# The newest versions that go together; a stage takes those of the stages before it.
requirements:
	rm -rf .venv/new && $(PYTHON) -m venv .venv/new
	.venv/new/bin/python $(PIP) install "$(TORCH)"
	: >.venv/new/before
	set -e; for stage in $(STAGES); do \
		.venv/new/bin/python $(PIP) install "$(TORCH)" -c .venv/new/before --editable ".[$$(echo $$stage | sed s/demo/cli/)]"; \
		.venv/new/bin/python $(PIP) freeze --all --exclude-editable | LC_ALL=C sort \
			| grep -vE '^(torch|triton|nvidia[a-z0-9-]*|cuda[a-z0-9-]*|pip|setuptools|wheel)==' >.venv/new/now; \
		LC_ALL=C comm -13 .venv/new/before .venv/new/now >requirements/$$stage.txt; \
		mv .venv/new/now .venv/new/before; \
	done
	rm -rf .venv/new

# lists them
bench: .venv/.test
	$(BIN)/python -m benchmarks

# Linux and root; 20 minutes, and goes on where it was stopped
bench-network: .venv/.test .venv/.decent-dp
	$(BIN)/python -m benchmarks.network --minutes 20

# hours; goes on where it was stopped
bench-network-full: .venv/.test .venv/.decent-dp
	$(BIN)/python -m benchmarks.network --grid full

# half an hour; goes on where it was stopped. As root on Linux with faults of links, too
bench-chaos: .venv/.test
	$(BIN)/python -m benchmarks.chaos

# a contestant; without its dependencies, that it may not choose a torch
.venv/.decent-dp: .venv/.demo
	$(BIN)/python $(PIP) install --no-deps decent-dp==0.2.3 "loguru>=0.7.3,<1"
	touch $@

clean:
	rm -rf .venv build dist docs/_build .pytest_cache .ruff_cache .hypothesis
