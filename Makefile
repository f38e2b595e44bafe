# Everything a plain machine needs is python3 (3.11 or newer) and make: each target first prepares
# the virtual environment .venv/<version> from requirements.txt, once.
#
#   make test PYTHON=python3.13          another Python, in an environment of its own
#   make test ARGS="tests/unit -x"       other arguments for the command behind the target

PYTHON ?= python3
ARGS ?=

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(VERSION),)
$(error '$(PYTHON)' cannot be run. Name a Python 3.11 or newer: make PYTHON=python3.13)
endif

VENV := .venv/$(VERSION)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := .venv/tools-$(VERSION)
LOCK := uv pip compile --quiet --universal --generate-hashes --no-annotate --no-header --python-version 3.11

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test torture bench lint format types check lock audit ci clean

help:  ## List the targets
	@echo "Relay: durable background jobs for Django with no broker"
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "Python $(VERSION) from '$(PYTHON)'; choose another with PYTHON=python3.13."

$(READY): requirements.txt .ci/venv
	@.ci/venv $(PYTHON) $(VENV)

setup: $(READY)  ## Prepare the virtual environment only

demo: $(READY)  ## Watch Relay at work for a minute, on a scratch database
	@$(BIN)/python -m django relay demo --settings relay_queue.lab.settings $(ARGS)

serve: $(READY)  ## Start the web server and a worker; prints where to log in
	@exec $(BIN)/python -m relay_project.serve $(ARGS)

test: $(READY)  ## Run the tests (ARGS="tests/unit -x" for some)
	@command -v chromium >/dev/null || .ci/install-chromium || echo "!!! No Chromium: tests of the console will fail."
	@$(BIN)/python -m pytest -n $$(( 2 * $$(getconf _NPROCESSORS_ONLN) )) --dist loadgroup $(ARGS)

torture: $(READY)  ## Run the long tests of killing and crashing
	@$(BIN)/python -m pytest -m torture --timeout 3600 $(ARGS)

bench: $(READY)  ## Measure the speed of this machine beside bare SQLite
	@$(BIN)/python manage.py relay bench $(ARGS)

lint: $(READY)  ## Check style and layout of the code
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(READY)  ## Lay out the code and fix what can be fixed by itself
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

types: $(READY)  ## Check the types
	@$(BIN)/mypy $(ARGS)

check: $(READY)  ## Run Django's checks and look for missing migrations
	@$(BIN)/python manage.py check
	@DJANGO_SETTINGS_MODULE=tests.settings $(BIN)/python manage.py makemigrations --check --dry-run

$(TOOLS)/.ready: .ci/tools.txt .ci/venv
	@.ci/venv $(PYTHON) $(TOOLS) .ci/tools.txt

lock: $(TOOLS)/.ready  ## Resolve the pins into locks with hashes (ARGS="--upgrade" for newer ones)
	@$(TOOLS)/bin/$(LOCK) $(ARGS) .ci/requirements.in --output-file requirements.txt >/dev/null
	@$(TOOLS)/bin/$(LOCK) $(ARGS) .ci/tools.in --output-file .ci/tools.txt >/dev/null

audit: $(TOOLS)/.ready  ## Fail on a known hole in a pinned package
	@.ci/audit $(TOOLS)/bin/pip-audit

ci:  ## Do what the build machine does, on every Python found here
	@.ci/run

clean:  ## Remove environments and caches; the database in var/ stays
	rm -rf .venv .nox .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
