# Everything from nothing: `make demo` runs the main job, `make test` installs and passes the tests.
# Both need Python 3.11+, make and a network to the package registry.

PYTHON ?= python3
BIN := .venv/bin
PIP = @$(PYTHON) tools/one-line $(BIN)/python -m pip install
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Where the environment keeps Python from keeping bytecode, every process of a test compiles weft.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test examples soak lint types layers docs check package clean

demo: .venv/report
	$(BIN)/weft demo

# Tests mostly wait, for processes that start and for deadlines: three at once fill two cores.
test: .venv/test
	$(BIN)/python -m pytest -q -n 3 --dist worksteal

# All examples, or EXAMPLES, by the commands that their READMEs name, with weft installed as users
# install it.
examples .venv-examples/made: BIN := .venv-examples/bin
examples: .venv-examples/made
	$(PIP) --quiet --no-deps .
	$(BIN)/python tools/examples $(EXAMPLES)

# Ten thousand random programs on every wire, which takes a while.
soak: .venv/test
	$(BIN)/python benchmarks/soak.py

lint: .venv/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/lint
	$(BIN)/mypy

layers: .venv/lint
	$(BIN)/lint-imports

docs: .venv/docs
	$(BIN)/mkdocs build --strict --quiet

check: lint types layers docs test

# What a release uploads: the wheel and the source archive, in dist/. The wheel is installed into an
# empty environment, and has to serve there.
package: .venv/package
	rm -rf dist .venv-package
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv .venv-package
	.venv-package/bin/python -m pip install --quiet --constraint constraints.txt torch
	.venv-package/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd dist && ../.venv-package/bin/python -c "import weft; weft.init(); weft.barrier(); weft.shutdown()"
	rm -rf .venv-package

# The pinned torch comes first and alone: a range would bring the registry's newest build, with
# gigabytes of CUDA. The versions of tools stand in pyproject.toml, in the dependency groups.
.venv/base: pyproject.toml constraints.txt
	@echo "making .venv and installing PyTorch and weft there: once, some minutes"
	$(PYTHON) -m venv .venv
	$(PIP) --quiet --upgrade 'pip>=25.1'
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt --editable .
	@touch $@

.venv/report: .venv/base
	$(PIP) --constraint constraints.txt --editable '.[report]'
	@touch $@

.venv/test: .venv/report
	$(PIP) --quiet --constraint constraints.txt --group test
	@touch $@

.venv/lint: .venv/test
	$(PIP) --quiet --constraint constraints.txt --group lint
	@touch $@

.venv/package: .venv/base
	$(PIP) --quiet --group package
	@touch $@

.venv/docs: .venv/base
	$(PIP) --quiet --constraint constraints.txt --group docs
	@touch $@

# The frameworks that examples train under, which the other tests do without.
.venv-examples/made: pyproject.toml constraints.txt
	@echo "making .venv-examples and installing PyTorch and other frameworks there: once, some minutes"
	$(PYTHON) -m venv .venv-examples
	$(PIP) --quiet --upgrade 'pip>=25.1'
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt '.[report]' --group examples
	@touch $@

clean:
	rm -rf .venv .venv-examples .venv-package dist site weft-demo
