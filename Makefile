# Every chore has one command; each sets up what it needs. Wants python3 (3.11 or newer), make, and gcc or clang if
# there is one. `make PYTHON=python3.12 install` chooses the interpreter; ARGS are passed on.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOWEST := .venv-lowest
DOCS := .venv-docs
RELEASE := .venv-release
READY := $(VENV)/.ready
INSTALLED := $(VENV)/.installed
PIP = $(BIN)/python -m pip install --disable-pip-version-check --no-compile
TORCH ?= torch==2.13.0
MODEL ?= smollm2-135m
ARGS ?=
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install browser demo test test-all test-lowest test-planted lint format bench wheel wheels docs clean

help: ## list these commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "make %-13s %s\n", $$1, $$2}'

install: $(INSTALLED) ## make .venv, install Outrider into it and what tests and linters need, build the C kernels

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed; this is {v[0]}.{v[1]}. Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# What users need: the library, the command line, the server. What contributors need comes on top, in the same .venv.
# torch is named with its version: a plain `torch` may bring several gigabytes of CUDA packages with it.
# Modules are compiled when they are first imported, which must then be allowed: most of them never are.
# The pip that comes with Python may be years old, and twice as slow as today's.
$(READY): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --quiet --upgrade pip
	$(PIP) -c constraints.txt '$(TORCH)' -e '.[serve]'
	@$(BIN)/python -c "from outrider.model.kernels.build import library; from outrider.settings import cache_folder; library(cache_folder() / 'kernels')" 2>/dev/null \
		|| echo "The C kernels cannot be built here (is there a C compiler?); torch's own will be used, which is slower."
	@touch $@

$(INSTALLED): $(READY)
	$(PIP) -c constraints.txt '$(TORCH)' -e '.[dev]'
	@touch $@

demo: $(READY) ## install Outrider, fetch the built-in model and see it answer plainly and speculatively
	$(BIN)/outrider models pull $(MODEL)
	$(BIN)/outrider demo $(MODEL) $(ARGS)

# Tests of pages in a browser are skipped without these. Debian's Chromium needs root, axe-core needs npm.
browser: ## install Chromium and axe-core, for tests of pages in a real browser, where that is possible
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
		|| { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
		|| echo "Chromium cannot be installed here: tests of pages in a browser are skipped."
	@[ -f node_modules/axe-core/axe.min.js ] || npm install --no-save --no-package-lock --ignore-scripts --silent axe-core@4 \
		|| echo "axe-core cannot be installed here: tests of contrast and labels are skipped."

# A process per core; `ARGS="tests/cli -x"`, `ARGS=--pdb` and single files run as pytest alone would run them.
# `ARGS=--lf` runs what failed last time. Tests marked `alone` come after the others, where ARGS name no files.
test: install ## run the tests: about 15 minutes on two cores
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)
	$(if $(filter-out -%,$(ARGS)),,$(BIN)/python -m pytest -m alone)

test-all: install ## run the tests and the long sweeps too: before work on kernels is done
	$(BIN)/python -m pytest -n auto --dist worksteal -m "" $(ARGS)

# torch is not the oldest that pyproject.toml allows: 2.11 has no small build for CPUs on every index, and is what runs
# on the GPUs of log/.
test-lowest: $(LOWEST)/.installed ## run the tests with the oldest versions that pyproject.toml allows, in .venv-lowest
	$(LOWEST)/bin/python -m pytest -n auto --dist worksteal $(ARGS)

$(LOWEST)/.installed: pyproject.toml constraints.txt tests/lowest.py
	$(PYTHON) -m venv --clear --upgrade-deps $(LOWEST)
	$(PYTHON) tests/lowest.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --no-compile -c $(LOWEST)/constraints.txt -c constraints.txt '$(TORCH)' -e '.[dev]'
	@touch $@

test-planted: install ## plant known faults into a copy, one at a time: do the tests notice?
	$(BIN)/python -m tests.planted $(ARGS)

lint: install ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install ## put the code in its format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

# The wheel is built from the sdist, so the sdist is complete. Metadata that an index would refuse is an error.
wheel: $(RELEASE)/.installed ## build an sdist and a wheel for every system, without the C kernels' libraries, into dist/
	$(RELEASE)/bin/python -m build --outdir dist .
	$(RELEASE)/bin/twine check --strict dist/*

wheels: install ## build wheels with the C kernels inside, for Linux, macOS and Windows, into dist/
	$(BIN)/python deploy/wheels.py dist

bench: install ## measure speed on this machine
	$(BIN)/outrider bench $(ARGS)

docs: $(DOCS)/.installed ## build the documentation site: build/docs/site/index.html
	$(DOCS)/bin/python docs/site/stage.py
	$(DOCS)/bin/zensical build --strict -f build/docs/zensical.toml

# An extra of pyproject.toml in an environment of its own, without Outrider. The API reference is read from the source.
$(DOCS)/.installed $(RELEASE)/.installed: .venv-%/.installed: pyproject.toml
	$(PYTHON) -m venv --clear --upgrade-deps .venv-$*
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$*"], sep="\n")' > .venv-$*/requirements.txt
	.venv-$*/bin/python -m pip install --no-compile -r .venv-$*/requirements.txt
	@touch $@

clean: ## remove what builds and tests leave behind, but not .venv
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f $(READY) $(INSTALLED)
