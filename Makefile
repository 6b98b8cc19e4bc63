# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
#
# Every target does its own set-up: a virtual environment, PyTorch, the project.
#   make pretrain   train a small GPT on real text with FSDP v2 (FLAGS= trains it with megatron-core's DDP)
#   make test       run the whole test suite
#   make lint       format, lint, type and spelling checks
#   make docs       build the documentation into runs/site

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
NPROC ?= 2
FLAGS ?= --use-megatron-fsdp-v2
INSTALLED := $(VENV)/.installed

export OMP_NUM_THREADS ?= 1

.PHONY: pretrain test lint docs clean

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
	$(VENV)/bin/python -m pytest -n 2 --no-loadscope-reorder

lint: $(INSTALLED)
	PATH="$(abspath $(VENV))/bin:$$PATH" $(VENV)/bin/pre-commit run --all-files

docs: $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	$(VENV)/bin/mkdocs build --strict --site-dir runs/site

clean:
	rm -rf $(VENV) build runs
