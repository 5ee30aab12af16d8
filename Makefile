# Each target sets up what it needs. Requirements: Python 3.11 or newer, and make.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
ARGS ?=
DATA ?=

# Some virtual machines advertise AMX but trap on its first use.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
# uv does not read pip's variables: pass on the folders of local wheels.
comma := ,
empty :=
export UV_FIND_LINKS ?= $(subst $(empty) $(empty),$(comma),$(PIP_FIND_LINKS))
# Importing transformers without compiled bytecode takes four times as long.
export UV_COMPILE_BYTECODE := 1

.PHONY: help setup demo test common lint bench paper clean

help:
	@echo "make setup             create the virtual environment $(VENV) with all dependencies"
	@echo "make demo              embed and search Python's documentation (2 minutes; ARGS=--pretrain for training)"
	@echo "make test              run the tests (ARGS=... for pytest)"
	@echo "make common            run transformers' own model tests on the Linformer models"
	@echo "make lint              run ruff and mypy"
	@echo "make bench             measure time and memory on this machine (ARGS=... for linformers bench)"
	@echo "make paper DATA=DIR    reproduce the paper's tables and figures (ARGS=... for python -m paper)"
	@echo "make clean             delete $(VENV) and the caches"

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "linformers needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet uv
	$(VENV)/bin/uv pip install --quiet --python $(VENV)/bin/python -c constraints.txt -e '.[dev]'
	touch $@

# Threads that spin while they wait take up to three times as long beside other busy processes.
demo: export OMP_WAIT_POLICY ?= PASSIVE
demo: setup
	$(RUN) linformers demo $(ARGS)

test: setup
	OMP_NUM_THREADS=1 $(RUN) pytest -n 2 --dist worksteal --durations 30 $(ARGS)

common: setup
	$(RUN) tests.transformers_common $(ARGS)

lint: setup
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

bench: setup
	$(RUN) linformers bench $(ARGS)

paper: setup
	@test -n "$(DATA)" || { echo "make paper needs the folder of the data: make paper DATA=DIR"; exit 2; }
	$(RUN) paper --data $(DATA) $(ARGS)

clean:
	rm -rf $(VENV) .cache .pytest_cache .hypothesis .mypy_cache .ruff_cache
