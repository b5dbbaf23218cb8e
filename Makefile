# make demo and make test set everything up on a fresh machine; the other targets reuse what they made.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
RESULTS ?= benchmarks/results
SOURCES := $(wildcard csrc/*.h csrc/*/*)

.PHONY: help setup demo test quick lint types budget unit test-slow emulate chaos gpu gpu-gate gpu-headline gpu-attention gpu-rest gpu-list bench bench-save bench-compare bench-floor report clean

help:
	@echo "make demo       pretrain a small encoder on text found on this machine, and look at it (a few minutes)"
	@echo "make test       lint, types, the kernels compiled for sm_80 and sm_90, and the tests"
	@echo "make quick      the tests of ops, data, model and training without kernels and kills, in a minute"
	@echo "make lint | types | budget | unit | test-slow | bench | clean"
	@echo "make emulate    every Triton kernel as an A100 runs it, instruction by instruction on the CPU, and checked"
	@echo "make chaos      a small run and its data killed a hundred times and damaged in every way; its last line has the counts"
	@echo "make report     the tables of the READMEs, written from benchmarks/results/"
	@echo "make bench-floor   ratios over what is replaced, in CPU seconds, against benchmarks/floors.json; for a nightly job"
	@echo "make bench-save | bench-compare   the same now, and against what was saved"
	@echo "make gpu        GPU tests and benchmarks with the Python in PYTHON and nothing installed, rows into RESULTS; its parts"
	@echo "                are gpu-gate | gpu-headline | gpu-attention | gpu-rest; make gpu-list says what they run"

setup: $(STAMP)

# torch and what the extension is built with go first: it is compiled against the torch it will run with.
$(STAMP): pyproject.toml setup.py constraints.txt $(SOURCES)
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv .venv
	$(PIP) torch setuptools pybind11
	$(PIP) --no-build-isolation --editable ".[hf,lightning,finetune,dev]"
	@touch $(STAMP)

demo: setup
	$(BIN)/maelm-fast demo --out demo-run

test: lint types budget unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

budget: setup
	$(BIN)/python -m benchmarks.kernel_budget

unit: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" --numprocesses=auto --maxprocesses=8 --dist=worksteal

# By names, so that nobody keeps a list: what interprets or compiles, or starts and kills processes, takes the time.
QUICK := not triton and not kernel and not flex and not compil and not opcheck and not process and not kill

quick: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -k "$(QUICK)" tests/ops tests/data tests/model tests/training

test-slow: setup
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m benchmarks.kernel_budget --all

emulate: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tests.emulation.plugin tests/emulation tests/ops tests/training/test_step.py \
		-k "emulation or triton or kernel or feed_forward"

chaos: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos

bench: setup
	$(BIN)/python -m benchmarks.ops --device cpu
	$(BIN)/python -m benchmarks.train_step

report: setup
	$(BIN)/python -m benchmarks.report --write

bench-save: setup
	@mkdir -p .benchmarks
	$(BIN)/python -m benchmarks.floor --save .benchmarks/floors.json

bench-compare: setup
	$(BIN)/python -m benchmarks.floor --floors .benchmarks/floors.json

# Nightly: ratios in CPU seconds, so that other work on the machine matters little. Fails where one is below its floor.
bench-floor: setup
	$(BIN)/python -m benchmarks.floor

# The machine's own packages, whatever they are: what is missing is skipped with its name. make gpu RESULTS=FOLDER
gpu gpu-gate gpu-headline gpu-attention gpu-rest:
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu $(filter-out gpu,$(@:gpu-%=%)) --results $(RESULTS)

gpu-list:
	@PYTHONPATH=. $(PYTHON) -m benchmarks.gpu --list --results $(RESULTS)

clean:
	rm -rf .venv build dist *.egg-info demo-run maelm_fast/*.so
