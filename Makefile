# make demo | make test | make test-slow: each makes .venv and installs what it needs by itself.
#   PYTHON=python3.12   the interpreter to start from (default: python3)
#   VENV=               empty: install nothing, use PYTHON as it is (a machine that already has all packages)
#   ARGS="..."          more arguments for the demo or for pytest

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
READY :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
READY := $(VENV)/.overlapc-installed
endif

.PHONY: demo test test-slow format clean

demo: $(READY)
	$(PY) -m overlapc.launch.cli demo $(ARGS)

test: $(READY)
	$(PY) tools/check.py $(ARGS)

test-slow: $(READY)
	$(PY) -m pytest -m slow $(ARGS)

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf .venv build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

ifneq ($(strip $(VENV)),)
$(READY): pyproject.toml tools/install.py
	$(PYTHON) tools/install.py --venv $(VENV)
endif
