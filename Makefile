# make demo | test | test-all | check | style | bench | docs      everything installs itself into .venv first

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=
# one thread for each of two processes; what the tests compile is kept for the next run
TESTING := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all check style bench theory docs clean

help:
	@echo "make demo      digits and invented authors: two leaderboards with samples (ARGS=--full: four)"
	@echo "make test      the tests that a change is likely to break: minutes"
	@echo "make test-all  every test: before a release"
	@echo "make check     ruff, import-linter and mypy"
	@echo "make style     format and fix"
	@echo "make bench     speed of our parts against naive versions and peers"
	@echo "make theory    the paper's theory, measured"
	@echo "make docs      the documentation as a site, in build/docs"

install: $(STAMP)

$(STAMP): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: Python 3.11 or newer is needed; set PYTHON=python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv > $(VENV)/install.log 2>&1 \
	  || { echo "error: no package index can be reached (is there a network?); see $(VENV)/install.log"; exit 2; }
	@echo "installing into $(VENV) (a few minutes the first time) ..."
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode -e '.[dev]' > $(VENV)/install.log 2>&1 \
	  || { echo "error: the install failed (is there a network?); see $(VENV)/install.log"; exit 2; }
	@$(BIN)/python -m compileall -q src common vision language benchmarks tools
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/unlearn demo $(ARGS)

test: $(STAMP)
	@$(TESTING) $(BIN)/python -m pytest -n 2 --dist loadscope $(ARGS)

test-all: $(STAMP)
	@$(TESTING) $(BIN)/python -m pytest -n 2 --dist loadscope -m "" $(ARGS)

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "run: make style"; exit 1; }
	@$(BIN)/lint-imports --no-cache > $(VENV)/imports.log 2>&1 || { cat $(VENV)/imports.log; exit 1; }
	@$(BIN)/mypy -p stable_forgetting -p tools
	@$(BIN)/mypy --strict -p stable_forgetting.common

style: $(STAMP)
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

bench: $(STAMP)
	@$(BIN)/python -m tools.perf $(ARGS)

docs: $(STAMP)
	@$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir build/docs
	@echo "build/docs/index.html"

theory: $(STAMP)
	@$(BIN)/python -m tools.theory --out runs/theory $(ARGS)

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
