# Every target does the set-up it needs, from Python 3.11+ and make alone.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
ARGS ?=

# Some virtual machines advertise AMX and trap on its first use.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
# uv reads its own variables: hand it the folders of wheels that pip would look into.
comma := ,
empty :=
export UV_FIND_LINKS ?= $(subst $(empty) $(empty),$(comma),$(PIP_FIND_LINKS))
# Importing transformers without compiled bytecode takes four times as long.
export UV_COMPILE_BYTECODE := 1

.PHONY: help setup demo test common lint bench clean

help:
	@echo "make setup   a virtual environment in $(VENV) with everything"
	@echo "make demo    a Linformer beside its Transformer twin, in three to five minutes"
	@echo "make test    all tests (ARGS=... for pytest)"
	@echo "make common  transformers' own model tests against Linformer"
	@echo "make lint    ruff and mypy"
	@echo "make bench   time and memory over (n, k) (ARGS=... for linformers bench)"

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "linformers needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet uv
	$(VENV)/bin/uv pip install --quiet --python $(VENV)/bin/python -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(RUN) linformers demo $(ARGS)

test: setup
	OMP_NUM_THREADS=1 $(RUN) pytest -n 2 --dist worksteal --durations 30 $(ARGS)

common: setup
	$(VENV)/bin/uv pip install --quiet --python $(VENV)/bin/python -c constraints.txt parameterized
	$(RUN) tests.transformers_common

lint: setup
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

bench: setup
	$(RUN) linformers bench $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache
