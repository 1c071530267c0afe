# Each target sets up what it needs: .venv, torch and the tools in it, the built extension. A second call redoes only
# what changed. Needs python3 >= 3.10 with venv and headers, g++ and make; no environment has to be active.
PYTHON ?= python3
TORCH_VERSION ?= 2.13.0
PIP_ARGS ?=
ARGS ?=

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
REQUIREMENTS := $(wildcard requirements/*.txt)
# The stamps carry torch's version: an extension fits only the torch it was compiled against.
INSTALLED := .venv/installed-torch-$(TORCH_VERSION)
BUILT := build/built-torch-$(TORCH_VERSION)
# Tests are many and small: two processes. ARGS='-n 0' is one, for a debugger.
IN_PARALLEL := -n 2 --dist worksteal
export CXX

.PHONY: help demo test bench build lint clean always
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a small language model with both attention layers and compare them (ARGS=--quick: 30 s)"
	@echo "make test    the default test suite (ARGS='-k masks')"
	@echo "make bench   measure against PyTorch's attention (ARGS=--help)"
	@echo "make build   only set up and build the extension in place"
	@echo "make lint    formatters, type checks, warnings as errors, sanitizers"
	@echo "make clean   remove what was built (.venv stays)"
	@echo "Variables: PYTHON=python3.12  CXX=g++-13  TORCH_VERSION=2.13.0  PIP_ARGS='--index-url ...' (where torch comes from)"

demo: build
	@$(PY) -m mha_ext.demo $(ARGS)

test: build
	@$(PY) -m pytest $(IN_PARALLEL) $(ARGS)

bench: build
	@$(PY) -m benchmarks.run $(ARGS)

lint: build
	@.ci/lint

build: $(BUILT)

$(PY):
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.10 or newer with its venv module"; exit 1; }
	@$(PYTHON) tools/check_environment.py
	@echo "Creating .venv"
	@$(PYTHON) -m venv .venv

# A torch that somebody replaced by hand is replaced again.
ifeq ($(wildcard .venv/lib/python3*/site-packages/torch-$(TORCH_VERSION)*.dist-info),)
$(INSTALLED): always
endif
$(INSTALLED): $(REQUIREMENTS) | $(PY)
	@echo "Installing torch $(TORCH_VERSION) and the tools into .venv"
	@$(PIP) install $(PIP_ARGS) "torch==$(TORCH_VERSION)"
	@$(PIP) install $(REQUIREMENTS:%=-r %)
	@rm -f .venv/installed-torch-* && touch $@

ifeq ($(wildcard mha_ext/_C*.so),)
$(BUILT): always
endif
$(BUILT): $(INSTALLED) setup.py $(shell find csrc)
	@$(PY) tools/check_environment.py
	@echo "Building mha_ext._C (a few minutes the first time; log in build/build.log)"
	@mkdir -p build && rm -f build/built-torch-*
	@$(PY) setup.py --quiet build_ext --inplace > build/build.log 2>&1 || { tail -n 60 build/build.log; exit 1; }
	@echo "$(CURDIR)" > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/mha_ext_checkout.pth"
	@touch $@

clean:
	rm -rf build dist mha_ext.egg-info mha_ext/_C*.so mha_ext/_build_info.json .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find mha_ext tests benchmarks tools -name __pycache__ -prune -exec rm -rf {} +
