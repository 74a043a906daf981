# Everything from nothing: `make demo` runs the main job, `make test` installs and passes the tests.
# Both need Python 3.11+, make and a network to the package registry.

PYTHON ?= python3

# Which PyTorch: pinned, newest or nightly. Each has an environment and a file of constraints.
TORCH ?= pinned
SUFFIX := $(if $(filter-out pinned,$(TORCH)),-$(TORCH))
VENV := .venv$(SUFFIX)
EXAMPLES_VENV := .venv-examples$(SUFFIX)
CONSTRAINTS := constraints$(SUFFIX).txt

# PyTorch's index of builds for the CPU. The package registry's build for Linux on x86-64 brings
# gigabytes of CUDA; it is taken where this index does not answer, or where this is set to nothing.
TORCH_INDEX ?= https://download.pytorch.org/whl/$(if $(filter nightly,$(TORCH)),nightly/)cpu
INSTALL_TORCH = tools/install-torch '$(TORCH_INDEX)' --constraint $(CONSTRAINTS)

# Tests to run in place of all: files, folders, options of pytest.
TESTS ?=

BIN := $(VENV)/bin
PIP = @$(PYTHON) tools/one-line $(BIN)/python -m pip install
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Where the environment keeps Python from keeping bytecode, every process of a test compiles weft.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test examples soak lint types layers docs check workflows package clean

demo: $(VENV)/base
	$(BIN)/weft demo

# Tests mostly wait, for processes that start and for deadlines: six at once fill two cores.
test: $(VENV)/test
	$(BIN)/python -m pytest -q -n 6 --dist worksteal $(TESTS)

# All examples, or EXAMPLES, by the commands that their READMEs name, with weft installed as users
# install it.
examples $(EXAMPLES_VENV)/made: BIN := $(EXAMPLES_VENV)/bin
examples: $(EXAMPLES_VENV)/made
	$(PIP) --quiet --no-deps .
	$(BIN)/python tools/examples $(EXAMPLES)

# Ten thousand random programs on every wire, which takes a while.
soak: $(VENV)/test
	$(BIN)/python benchmarks/soak.py

lint: $(VENV)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Comments that silence mypy are those that the pinned torch needs; a newer one needs fewer.
types: $(VENV)/lint
	$(BIN)/mypy $(if $(SUFFIX),--no-warn-unused-ignores)

layers: $(VENV)/lint
	$(BIN)/lint-imports

docs: $(VENV)/docs
	$(BIN)/mkdocs build --strict --quiet

check: lint types layers docs test

# Whether somebody else could make the workflows run code of theirs, or take what these know.
workflows: $(VENV)/package
	$(BIN)/zizmor --offline --quiet .github

# What a release uploads: the wheel and the source archive, in dist/. The wheel is installed into an
# empty environment, and has to serve there: first the library alone, of whose environment sbom.json
# is the list (CycloneDX), and with it the command line.
package: $(VENV)/package
	rm -rf dist .venv-package
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv .venv-package
	$(PYTHON) tools/one-line .venv-package/bin/python $(INSTALL_TORCH)
	.venv-package/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) dist/*.whl
	cd dist && ../.venv-package/bin/python -c "import weft; weft.init(); weft.barrier(); weft.shutdown()"
	.venv-package/bin/weft --version
	.venv-package/bin/weft doctor
	$(BIN)/cyclonedx-py environment --output-reproducible --output-file sbom.json .venv-package/bin/python
	rm -rf .venv-package

# PyTorch comes first and alone, so that nothing else chooses its build. The versions of tools stand
# in pyproject.toml, in the dependency groups.
$(VENV)/base: pyproject.toml $(CONSTRAINTS)
	@echo "making $(VENV) and installing PyTorch and weft there: once, some minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --quiet --upgrade 'pip>=25.1'
	@$(PYTHON) tools/one-line $(BIN)/python $(INSTALL_TORCH)
	$(PIP) --constraint $(CONSTRAINTS) --editable '.[demo]'
	@touch $@

$(VENV)/test: $(VENV)/base
	$(PIP) --quiet --constraint $(CONSTRAINTS) --group test
	@touch $@

$(VENV)/lint: $(VENV)/test
	$(PIP) --quiet --constraint $(CONSTRAINTS) --group lint
	@touch $@

$(VENV)/package: $(VENV)/base
	$(PIP) --quiet --group package
	@touch $@

$(VENV)/docs: $(VENV)/base
	$(PIP) --quiet --constraint $(CONSTRAINTS) --group docs
	@touch $@

# The frameworks that examples train under, which the other tests do without.
$(EXAMPLES_VENV)/made: pyproject.toml $(CONSTRAINTS)
	@echo "making $(EXAMPLES_VENV) and installing PyTorch and other frameworks there: once, some minutes"
	$(PYTHON) -m venv $(EXAMPLES_VENV)
	$(PIP) --quiet --upgrade 'pip>=25.1'
	@$(PYTHON) tools/one-line $(BIN)/python $(INSTALL_TORCH)
	$(PIP) --constraint $(CONSTRAINTS) '.[demo]' --group examples
	@touch $@

clean:
	rm -rf .venv .venv-newest .venv-nightly .venv-examples* .venv-package dist sbom.json site weft-demo
