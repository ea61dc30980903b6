# Every target sets itself up: it needs Python 3.11 or newer, pip and make, nothing else.
# Another Python: make demo PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

# The models of the tests are tiny: with more threads per worker the workers only wait for each other.
test: export OMP_NUM_THREADS = 1

.PHONY: help demo test lint typecheck format docs clean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(INSTALLED)  ## raw text to a PPO-tuned model in a few minutes, then a report
	$(BIN)/rlhf run demo

test: lint typecheck  ## everything that must pass: lint, typecheck and the tests
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(INSTALLED)  ## formatting, lint, and who may import whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo

# mypy cannot see into an editable install, so it reads the wheel, unpacked.
# An old build/ goes first: setuptools would put modules deleted since then back into the wheel.
typecheck: $(INSTALLED)  ## mypy on the wheel as people install it
	@rm -rf build
	@$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	@$(BIN)/pip install --quiet --no-deps --target build/installed build/wheel/*.whl
	MYPYPATH=build/installed $(BIN)/mypy

format: $(INSTALLED)  ## let ruff format the code and fix what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED)  ## the documentation as a site, in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## remove the environment, builds and caches; runs/ stays
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed; $(PYTHON) is {v[0]}.{v[1]}. Name another: make PYTHON=python3.12 ...")'
	@echo "Installing into .venv (a few minutes the first time) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
