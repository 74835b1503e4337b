# A machine with Python 3.11 or newer, make and git is enough: everything else goes into .venv.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3 python; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
BIN := .venv/bin
RUN_DIR ?= runs/default

# Some images set it: each of many processes would then compile the package, and each test's assertions, anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install train test-unit test test-all lint docs clean

install: .venv/installed

.venv/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; name one with make PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

# The embedded default: four workers, a tiny model, synthetic documents, charts and clips.
train: install
	$(BIN)/python jobs/prepare_data.py
	$(BIN)/python jobs/train.py run.dir=$(RUN_DIR)
	@echo "The run lies in $(RUN_DIR):"
	@echo "  metrics.jsonl   one line a step; ledger.jsonl: the samples of each step"
	@echo "  plans/          the groups of each step"
	@echo "  checkpoints/    the same command again continues from the newest"
	@echo "  model/          the trained model, for transformers' from_pretrained"
	@echo "Curves: $(BIN)/tensorboard --logdir $(RUN_DIR)/tensorboard"

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# In two minutes: no test that starts a process, needs Ray or computes for seconds.
test-unit: install
	$(BIN)/python -m pytest -n 2 -m 'not slow and not gpu and not processes and not seconds'

# What continuous integration runs, on two cores: three processes, since tests of ranks, signals and timeouts often wait.
test: install lint
	$(BIN)/python -m pytest -n 3 -o faulthandler_timeout=400

# Also what is slow, and what needs a CUDA device (those tests skip themselves where there is none); at last, with no other test
# beside them, those that compare clock times. Screenshots stay in build/artifacts.
test-all: install lint
	mkdir -p build/artifacts
	DHP_RAY_TEST_ARTIFACTS=$(CURDIR)/build/artifacts $(BIN)/python -m pytest -n 2 -m 'not alone'
	$(BIN)/python -m pytest -m alone

# README's pages in docs/ as a site: build/site/index.html.
docs: install
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv runs build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
