# Every target does its own set-up, in .venv: `make demo` and `make test` work on a fresh clone, in either order.

# Any Python from 3.11 to 3.13: make demo PYTHON=python3.12
PYTHON ?= python3
# Pins torch to the version that all this was tested with; see README. For a build of your own: make install CONSTRAINTS=
CONSTRAINTS ?= constraints.txt

BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
# One thread each for the test processes: they share the cores already.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile

.PHONY: help demo install test format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo     transcribe the example clips"
	@echo "make install  the command whisfusion, in .venv/bin"
	@echo "make test     formatting, lint, types and tests"
	@echo "make format   format and mend the code"
	@echo "make clean    remove .venv"

demo: .venv/.demo
	@$(BIN)/python examples/demo.py

install: .venv/.demo

test: .venv/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ty check --python .venv
	$(PYTEST)

format: .venv/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv

.venv/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info[:2] <= (3, 13) or sys.exit(1)' \
		|| { echo "whisfusion needs Python 3.11 to 3.13: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv

# The model is part of the demo's set-up, so that the demo itself runs without a network.
.venv/.demo: .venv/pyvenv.cfg pyproject.toml $(CONSTRAINTS)
	$(INSTALL) -e .
	$(BIN)/python examples/demo.py --prepare
	@touch $@

.venv/.test: .venv/pyvenv.cfg pyproject.toml $(CONSTRAINTS)
	$(INSTALL) -e '.[dev,plots]'
	@touch $@
