# make demo and make test set everything up on a fresh machine; the other targets reuse what they made.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: help setup demo test lint types unit test-slow gpu bench clean

help:
	@echo "make demo       pretrain a small encoder on text found on this machine, and look at it (a few minutes)"
	@echo "make test       lint, types and all tests"
	@echo "make lint | types | unit | test-slow | bench | clean"
	@echo "make gpu        GPU tests and benchmarks, with the Python in PYTHON and nothing installed"

setup: $(STAMP)

# torch goes first: the packages after it then find the version they need already there.
$(STAMP): pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[hf,plot,dev]"
	@touch $(STAMP)

demo: setup
	$(BIN)/maelm-fast demo --out demo-run

test: lint types unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: setup
	$(BIN)/python -m pytest -m slow

bench: setup
	$(BIN)/python -m benchmarks.train_step --peers hf

gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu tests/test_gpu.py
	PYTHONPATH=. $(PYTHON) -m benchmarks.train_step --peers hf --batch 32

clean:
	rm -rf .venv build dist *.egg-info demo-run
