# Two commands are all the set-up there is: `make train` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROJECTS := pyproject.toml research/pyproject.toml benchmarks/pyproject.toml \
	hatch_build.py $(wildcard src/atomtrain/native/build.py src/atomtrain/native/kernels/*)
CODE := src benchmarks research tests scripts
TRAIN_ARGS ?=

# Modules are compiled when they are first imported, which most of torch's never are. Where a
# variable forbids to keep that, each process would do it again.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test check first-hour torch-versions test-gpu bench-gpu interleavings lint types house docs pages pictures families release clean

train: $(VENV)/.installed
	$(BIN)/atom train $(TRAIN_ARGS)

# One thread: the tests compute little. Runs that they start take all cores, and OpenMP's threads
# would spin while they wait, although others run beside.
# Two processes, since much of the time is spent waiting; a file's tests stay together.
# Long files first: those of many short tests fill up what is left at the end (tests/conftest.py).
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
test: lint types house
	$(PYTEST) --durations=20 $(addprefix tests/,integration fault golden gpu unit)

# For people at work, in under three minutes: no test that takes longer than a second or two.
check: lint types house
	$(PYTEST) -q -m 'not slow and not matrix' tests/unit

# Where PYTHON is given, with any Python that has torch: nothing is installed or fetched.
ifeq ($(origin PYTHON),file)
GPU_PYTHON := $(BIN)/python
else
GPU_PYTHON := PYTHONPATH=$(CURDIR)/src:$(CURDIR)/benchmarks:$(CURDIR)/research $(PYTHON)
endif
GPU_READY = $(if $(filter file,$(origin PYTHON)),$(VENV)/$(1))

# The most that ten minutes on a new GPU can tell; FIRST_HOUR_ARGS="--device emulated" rehearses it.
FIRST_HOUR_ARGS ?=
first-hour:
	$(PYTHON) scripts/first-hour $(FIRST_HOUR_ARGS)

# One command for whoever has a GPU; skips cleanly without one.
test-gpu: $(call GPU_READY,.installed-dev)
	$(GPU_PYTHON) -m pytest tests -m gpu

# The fast tests and the golden ones with other versions, each in an environment of its own under
# .torch-versions; TORCH_VERSIONS_ARGS="--torch 2.14.1 --python python3.12" chooses.
TORCH_VERSIONS_ARGS ?=
torch-versions:
	$(PYTHON) scripts/torch-versions $(TORCH_VERSIONS_ARGS)

# What there is to measure on a GPU, into benchmarks/results: against others and resident training
# under caps that stand for small cards, and a 7B model.
BENCH := $(GPU_PYTHON) -m atomtrain.cli.main bench
bench-gpu: $(call GPU_READY,.installed-bench)
	for cap in 11 24; do \
	$(BENCH) offloaders --device cuda --device-memory $${cap}GiB --json \
	--out benchmarks/results/offloaders-cuda-$${cap}gib.json > /dev/null || exit; done
	$(BENCH) large --json --out benchmarks/results/large.json > /dev/null

$(VENV)/.installed-bench: $(VENV)/.installed benchmarks/pyproject.toml
	$(INSTALL) -e . -e research -e 'benchmarks[offloaders]'
	touch $@

# SCHEDULES of the swarm's protocol on a virtual clock, divided among PROCESSES. One that fails is
# printed; the same SEED draws the same ones.
SCHEDULES ?= 3000
PROCESSES ?= 2
SEED ?= $(shell date +%s)
interleavings: $(VENV)/.installed-dev
	@seq $(SEED) $$(($(SEED) + $(PROCESSES) - 1)) | ATOM_SWARM_EXAMPLES=$$(($(SCHEDULES) / $(PROCESSES))) \
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 xargs -P $(PROCESSES) -I SEED_OF_ONE nice $(BIN)/python -m pytest -q --timeout 0 \
	-p no:cacheprovider --hypothesis-profile other --hypothesis-seed SEED_OF_ONE \
	tests/unit/swarm/rounds/test_interleavings.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# Full folders, circles of imports and names that meet are refused.
house: $(VENV)/.installed-dev
	$(BIN)/python scripts/house --check

# The documentation site, in site/.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m atombench.pages commands families
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The tables in docs/, from code and from benchmarks/results; some minutes, for the plans.
pages: $(VENV)/.installed
	$(BIN)/python -m atombench.pages

# The pictures of README and docs, by a run of three peers and chromium; some minutes.
pictures: $(VENV)/.installed-dev
	$(BIN)/python scripts/pictures

# Every family of causal language models that transformers has, swapped against an ordinary loop;
# it takes a quarter of an hour.
families: $(VENV)/.installed
	$(BIN)/atom bench families --out benchmarks/results/families.json > /dev/null
	$(BIN)/python -m atombench.pages families analysis

# What is published, in dist/: built, checked, and tried in an environment without a compiler.
release: $(VENV)/.installed-release
	$(BIN)/python scripts/release

$(VENV)/.installed-release: $(VENV)/.installed pyproject.toml
	$(INSTALL) -e '.[release]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed pyproject.toml
	$(INSTALL) -e '.[docs]'
	touch $@

$(VENV)/bin/pip:
	./scripts/make-venv $(PYTHON) $(VENV)

$(VENV)/.installed: $(VENV)/bin/pip $(PROJECTS) constraints.txt
	$(INSTALL) -e '.[demo,swarm]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/bin/pip $(PROJECTS) constraints.txt
	$(INSTALL) -e '.[dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) .torch-versions .mypy_cache .ruff_cache .pytest_cache .hypothesis
