.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
export PYTHONPATH := $(CURDIR):$(CURDIR)/proto:$(CURDIR)/kernels$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help setup check pytest test test-full test-gpu test-clients coverage mutants demo bench docs stubs clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: .venv/ready ## a virtual environment in .venv from the pinned constraints

.venv/ready: pyproject.toml constraints.txt tools/setup_env.py
	@$(PYTHON) tools/setup_env.py

check: setup ## lint, types, import contracts, fresh stubs
	@$(BIN)/python tools/check.py

test: setup ## what CI runs: check, and beside it the tests on a CPU, in three workers
	@$(MAKE) --no-print-directory -j 2 check pytest

# where it is set, each worker compiles all tests anew, for ten seconds, and each process of a test our modules
pytest test-full coverage: export PYTHONDONTWRITEBYTECODE :=

pytest: setup
	@$(BIN)/python -m pytest -m "not gpu and not full" -n 3 --durations=25

test-full: setup ## all of every matrix of which `test` runs a choice
	@$(BIN)/python -m pytest -m "not gpu" -n 3 --durations=25

test-gpu: ## the tests marked gpu, with whatever python has torch with CUDA (PYTHON=...)
	@$(PYTHON) tools/test_gpu.py

test-clients: setup .venv-clients/ready ## OpenAI's and Anthropic's clients, agent frameworks and an evaluation harness against a cluster
	@.venv-clients/bin/python -m pytest -c tests/clients/pytest.ini --rootdir tests/clients --confcutdir tests/clients tests/clients

.venv-clients/ready: tests/clients/requirements.txt tests/clients/constraints.txt
	@$(PYTHON) -m venv --clear .venv-clients
	@.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt -c tests/clients/constraints.txt
	@touch $@

coverage: setup ## the tests with every line counted, child processes too: a table, and htmlcov/
	@$(BIN)/python -m coverage erase
	@$(BIN)/python -m coverage run -m pytest -m "not gpu and not full" --timeout 600
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage html --quiet
	@$(BIN)/python -m coverage report

mutants: setup ## break the code, one place at a time, and see whether its tests see it: a quarter of an hour
	@$(BIN)/python tools/mutants.py --jobs 2

demo: setup ## a cluster on this machine, shown at work
	@$(BIN)/python -m tools.demo

bench: setup ## N streams over HTTP against a cluster on this machine
	@$(BIN)/python -m benchmarks.serving.streams

docs: .venv-docs/ready ## the documentation and the API reference as a site, strictly, into site/
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

.venv-docs/ready: pyproject.toml constraints.txt
	@$(PYTHON) -m venv --clear .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[docs]'
	@touch $@

stubs: setup ## write the protobuf stubs anew
	@$(BIN)/python tools/generate_stubs.py

clean: ## remove the environments, caches and what was built
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
	@rm -rf .venv .venv-clients .venv-docs site htmlcov .coverage .coverage.* .schemathesis .setup.log .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info
