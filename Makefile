# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
#
# Every target does its own set-up: a virtual environment, PyTorch, the project.
#   make pretrain   train a small GPT on real text with FSDP v2 (FLAGS= trains it with megatron-core's DDP)
#   make test       run the whole test suite
#   make test-newest  run what touches megatron-core with the newest supported one, on Python 3.12
#   make lint       format, lint, type and spelling checks
#   make docs       build the documentation into runs/site

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
NPROC ?= 2
FLAGS ?= --use-megatron-fsdp-v2
INSTALLED := $(VENV)/.installed

# The newest megatron-core needs Python 3.12 (where pyenv has several, it takes its 3.12). That environment is kept
# outside the tree, in a folder named after what goes into it, so that it is built once on a machine.
PYTHON312 ?= env PYENV_VERSION=3.12 python3.12
NEWEST_CORE ?= megatron-core==0.19.2
NEWEST_KEY := $(shell (cat pyproject.toml; echo "$(TORCH) $(NEWEST_CORE)") | sha256sum | cut -c 1-12)
NEWEST_VENV ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/megatron-fsdp-v2/$(NEWEST_KEY)
NEWEST_INSTALLED := $(NEWEST_VENV)/.installed
# Layouts are there by their golden values (test_cases.py).
NEWEST_TESTS := $(patsubst %,tests/functional_tests/test_%.py,cases parity pretrain resume torch_dist stock_loop \
	predictions fp16 full_iteration) \
	$(wildcard tests/unit_tests/test_mcore_*.py) tests/unit_tests/test_megatron_training.py \
	$(wildcard tests/unit_tests/test_*optimizer*.py) tests/unit_tests/test_fused_gradients.py \
	tests/unit_tests/pretrain tests/unit_tests/checkpoint/test_torch_dist.py tests/unit_tests/inspector

export OMP_NUM_THREADS ?= 1

.PHONY: pretrain test test-newest lint docs clean

$(INSTALLED): pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

pretrain: $(INSTALLED)
	@PYTHON=$(VENV)/bin/python NPROC=$(NPROC) examples/megatron_fsdp/pretrain_bytes.sh \
		$(FLAGS) --plot runs/loss.png
	@echo "Or in short: make pretrain FLAGS= ; every flag: $(VENV)/bin/python pretrain_gpt.py --help"

# Two processes, which take whole files in turn (tests/conftest.py): while one waits, the other works.
test: $(INSTALLED)
	$(VENV)/bin/python -m pytest -n 2 --no-loadscope-reorder --durations 30

$(NEWEST_INSTALLED):
	$(PYTHON312) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(NEWEST_CORE)" ".[dev]"
	touch $@

# This checkout takes the place of the one that used the environment before.
test-newest: $(NEWEST_INSTALLED)
	$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	$(NEWEST_VENV)/bin/python -m pytest -n 2 --no-loadscope-reorder --durations 15 $(NEWEST_TESTS)

lint: $(INSTALLED)
	PATH="$(abspath $(VENV))/bin:$$PATH" $(VENV)/bin/pre-commit run --all-files

docs: $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	$(VENV)/bin/mkdocs build --strict --site-dir runs/site

clean:
	rm -rf $(VENV) build runs
