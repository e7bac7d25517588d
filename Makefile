# The two commands that matter: make demo, make test. Everything is installed into .venv; nothing else is touched.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# What was installed is remembered inside the environment, so that removing it starts afresh.
DEMO := $(VENV)/installed-demo
DEV := $(VENV)/installed-dev
# TensorFlow has an environment of its own. It looks into the first one for torch, allhands and pytest, so that they are not
# installed twice.
TF_VENV ?= .venv-tensorflow
TF_BIN := $(TF_VENV)/bin
TENSORFLOW := $(TF_VENV)/installed

.PHONY: help demo test test-all test-cluster test-tensorflow tensorflow-env lint lint-style lint-types lint-docs fix bench bench-gpu soak soak-membership docs conformance horovod peers clean

help:
	@echo "make demo   install, train on real digit images with two workers, say where to look"
	@echo "make test   install, run all tests; make test-cluster: those on real ssh hosts, Slurm and MPI"
	@echo "make test-tensorflow   those of allhands.horovod.tensorflow, in $(TF_VENV), which make tensorflow-env makes"
	@echo "make test-all   also the tests that quicker ones cover in part"
	@echo "make lint   style, types, layers, documentation; make fix mends the style"
	@echo "make soak-membership   let workers of an elastic training die, hang, leave and join (EVENTS=200)"
	@echo "make soak   attack a parameter server for a minute, then every port of two jobs for half a minute each (SECONDS=60)"
	@echo "make bench  measure against peers on the processors; make bench-gpu: on GPUs; both renew the tables of the documentation"
	@echo "make conformance   try all trainings under all strategies, and renew docs/what-works.md and the table of docs/loop.md"
	@echo "make horovod   renew docs/horovod_api.md, the states of Horovod's calls"
	@echo "make peers COALA=FOLDER MXNET=FOLDER CATALYST=FOLDER   renew the pages of their calls, from folders with their source"
	@echo "make docs   serve the documentation; make clean: remove what was made"

demo: $(DEMO)
	$(BIN)/python examples/digits/train.py

# Four files at a time on any number of cores, since tests that start several processes wait for much of their time; those that
# need hosts, Slurm or MPI are among them, each file with hosts of its own. Those of TensorFlow run beside them, and are shown
# after them. Both parts run, whatever the other one says.
FILES := $(BIN)/python -m pytest -n 4 --dist loadfile
QUICK = not rare
test-all:
	@$(MAKE) --no-print-directory test QUICK=
# The variable marks every process that a test starts; none with it may be left at the end.
test: export ALLHANDS_TEST_RUN := make-test-$(shell date +%s)-$(shell echo $$PPID)
test: $(DEV) $(TENSORFLOW)
	@status=0; \
	$(TF_TESTS) > $(TF_OUTPUT) 2>&1 & tensorflow=$$!; \
	$(FILES) -m "$(QUICK)" || status=1; \
	wait $$tensorflow || status=1; \
	cat $(TF_OUTPUT); \
	$(BIN)/python .ci/no_process_left.py || status=1; \
	if [ $$status -eq 0 ]; then echo "make test: passed"; else echo "make test: FAILED, see above"; fi; \
	exit $$status

test-cluster: $(DEV)
	$(FILES) -m cluster tests/cluster

TF_OUTPUT := $(TF_VENV)/tests.txt
TF_TESTS := $(TF_BIN)/python -m pytest tests/horovod/tensorflow
test-tensorflow: $(TENSORFLOW)
	$(TF_TESTS)

tensorflow-env: $(TENSORFLOW)

# Apart, so that `make -j 2 lint` runs them side by side: types and pages each use one core.
# Side by side; each part's output comes in one piece.
lint: $(DEV)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync lint-style lint-types lint-docs
lint-style: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
lint-types: $(DEV)
	$(BIN)/mypy
lint-docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

fix: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Results go to benchmarks/results, and from there into README.md, docs/benchmarks.md and docs/images.
bench: $(DEV)
	$(PIP) install --quiet -e '.[bench]' -c constraints.txt
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/step_overhead.py --workers 2
	$(BIN)/python benchmarks/launch.py
	$(BIN)/python benchmarks/kvstore.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/horovod.py --out horovod_2
	$(BIN)/python benchmarks/tables.py

# On one GPU of this machine, on two, on four and so on; a GPT in pieces takes them all.
bench-gpu: $(DEV)
	$(PIP) install --quiet -e '.[bench]' -c constraints.txt
	$(BIN)/python benchmarks/gpu_workers.py
	$(BIN)/python benchmarks/gpt_parallel.py
	$(BIN)/python benchmarks/tables.py

SECONDS := 60
EVENTS := 200
soak-membership: $(DEV)
	$(BIN)/python benchmarks/soak_membership.py --events $(EVENTS) --workers 4
	$(BIN)/python benchmarks/soak_membership.py --events 20 --shards 2

soak: $(DEV)
	$(BIN)/python benchmarks/soak_wire.py $(SECONDS)

horovod: $(DEV)
	$(BIN)/python -m tests.horovod.api.page

# What of peers' calls is here, of folders with their source: make peers CATALYST=../catalyst COALA=../COALA MXNET=../mxnet
peers: $(DEV)
	$(BIN)/python -m tests.peers CATALYST=$(CATALYST) COALA=$(COALA) MXNET=$(MXNET)

# Every training of tests/conformance under every strategy; the page is part of the documentation.
conformance: $(DEV)
	$(BIN)/python -m tests.conformance
	$(BIN)/python -m tests.examples.own_loop_table

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf site logs logdir .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "allhands needs Python 3.11 or newer; write make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet -e '.[data,report]' -c constraints.txt
	@touch $@

# Most files of these packages are never imported, and Python compiles those that are. What all
# tests import is compiled here, once, and not by each of the processes that begin together.
IMPORTED := import torch._dynamo, torch.utils.tensorboard, torchmetrics, flwr
$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --no-compile -e '.[dev]' -c constraints.txt
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -W ignore -c '$(IMPORTED)'
	@touch $@ $(DEMO)

$(TENSORFLOW): constraints.txt constraints-tensorflow.txt $(DEV)
	$(BIN)/python -m venv --without-pip $(TF_VENV)
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> $$($(TF_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/first_environment.pth
	$(TF_BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile tensorflow-cpu \
		-c constraints.txt -c constraints-tensorflow.txt
	@touch $@
