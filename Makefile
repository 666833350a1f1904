# Each line can be pasted into a shell without make. Elsewhere than on a machine with a GPU, take torch's
# CPU wheel:  make TORCH_INDEX=https://download.pytorch.org/whl/cpu test

TORCH_INDEX ?=
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --constraint constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Processes that run tests: one more than there are processors, as some tests wait; each takes half a GB of memory.
JOBS ?= $(shell n=$$(( $$(nproc 2>/dev/null || echo 2) + 1 )); echo $$(( n < 8 ? n : 8 )))

PYTEST = $(BIN)/python -m pytest -q --jobs $(JOBS)

# Many short processes run here: they keep what they compile.
unexport PYTHONDONTWRITEBYTECODE

coverage: export COVERAGE_FILE := $(CURDIR)/build/coverage/lines

.DEFAULT_GOAL := help
.PHONY: help .venv run test test-slow test-all coverage torture soak lint format docs docs-serve bench bench-embed bench-check bench-smoke profile clean

help:  ## list the targets
	@sed -n 's/^\([a-z.-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 13

.venv: .venv/.installed  ## make the virtual environment, with the pinned versions

# What the library and the examples need: 1.5 GB.
.venv/.run: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or later with venv found; name one: make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) --quiet --upgrade 'pip>=25.1' hatchling
	$(PIP) --no-build-isolation --editable '.[gym]'
	@touch $@

# What the tests need, too.
.venv/.installed: .venv/.run
	$(PIP) --quiet --group dev
	@touch $@

run: .venv/.run  ## collect CartPole into ./runs/cartpole.exp and train on it
	$(BIN)/python examples/cartpole_dqn.py

.venv/.loops: .venv/.installed tests/support/compile_loops.py $(shell grep -rl compiled expstore --include='*.py')
	$(BIN)/python -m tests.support.compile_loops
	@touch $@

test: .venv .venv/.loops  ## run the tests, without those that take seconds each
	$(PYTEST) --durations=10 -m "not slow and not torture"

test-slow: .venv .venv/.loops  ## run the tests that `make test` leaves out: browsers, kills of whole programs
	$(PYTEST) --durations=10 -m "slow and not torture"

test-all: .venv .venv/.loops  ## run the tests of `make test` and `make test-slow` together, which are collected once
	$(PYTEST) --durations=20 -m "not torture"

coverage: .venv .venv/.loops  ## say which lines no test runs, and how many changes of lines they notice (over an hour)
	rm -rf build/coverage
	mkdir -p build/coverage
	$(BIN)/coverage run -m pytest -q --jobs $(JOBS) -m "not torture" -o timeout=900
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --fail-under=95
	$(BIN)/python -m tests.support.mutation_sample --each 2 --least 0.6 --modules expstore api --data $(COVERAGE_FILE)

torture: .venv .venv/.loops  ## kill it ten thousand times (three hours on two cores; goes on where it was stopped)
	$(BIN)/python -m tests.support.torture

soak: .venv  ## an hour of steady work: a server's memory, descriptors and threads stay as they are
	$(BIN)/python -m tests.support.soak

lint: .venv  ## check format, style, imports, types, spelling, the shape of the code, and the page's scripts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy --strict expstore api tests/fixtures/typed_program.py
	$(BIN)/codespell
	$(BIN)/python -m tests.support.shape --check
	$(BIN)/python -m tests.support.page_scripts

format: .venv  ## write the format, and the fixes that are safe
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python -m tests.support.page_scripts --format

docs: .venv/.docs  ## build the documentation site into build/site; it is read without a server or a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: .venv/.docs  ## show the site at http://127.0.0.1:8000 while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

.venv/.docs: .venv/.installed
	$(PIP) --quiet --group docs
	@touch $@

bench: .venv/.bench  ## compare with TorchRL and others, 13 minutes
	$(BIN)/python -m benchmarks

bench-embed: .venv  ## put the figures of the last run into the documents and benchmarks/results
	$(BIN)/python -m benchmarks embed

bench-check: .venv  ## compare the ratios of the last run with those in benchmarks/results
	$(BIN)/python -m benchmarks check

bench-smoke: .venv  ## run the benchmarks once, tiny
	$(BIN)/python -m benchmarks --smoke

profile: .venv/.bench  ## say where the time of sample, extend and add goes
	$(BIN)/python -m benchmarks.profiles

.venv/.bench: .venv/.installed
	$(PIP) --quiet --group bench
	@touch $@

clean:  ## remove the environment, builds and caches; never ./runs
	rm -rf .venv build dist .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .hypothesis .torture
	find api expstore benchmarks examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
