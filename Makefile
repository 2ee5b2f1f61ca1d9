# A Debian or Ubuntu machine with git, make and Python 3.11 to 3.13 (python3-venv) is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install lock check lint types settings test test-all drills coverage demo picture bench table docs sbom release clean

install: $(VENV)/ready

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		|| { echo "$(PYTHON) is not Python 3.11 to 3.13: make PYTHON=python3.12 names another" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# By version and SHA-256, as in the images: requirements/.
$(VENV)/ready: pyproject.toml $(wildcard requirements/*.*) | $(BIN)/python
	@echo "installing silofl and what it needs into $(VENV); the first time this takes minutes"
	$(BIN)/python -m pip uninstall --quiet --yes silofl # pip check would read the requirements of before
	PYTHON=$(BIN)/python sh requirements/install.sh dev
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Write down anew what is installed, after a change of pyproject.toml; UPGRADE=1 moves every version to the newest that
# fits. With another version of PyTorch: TORCH_INDEX=URL, the index of its CPU builds.
lock:
	$(BIN)/python requirements/lock.py $(if $(UPGRADE),--upgrade) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

# Side by side: each takes some ten seconds of one core.
check: install
	@$(MAKE) --no-print-directory --jobs=2 --output-sync lint types

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python .ci/limits.py

types:
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then $(BIN)/mypy; \
		else echo "mypy: skipped; types are checked with Python 3.11 alone, for newer ones have another NumPy"; fi

# Write down what the code declares: settings (pyproject.toml, docs/settings.md), what each method shows (docs/attacks.md),
# the report's templates (server/templates.json), which an app carries.
settings: install
	$(BIN)/python -m strategies.base.declarations
	$(BIN)/python -m server.rendering

# The suite without containers, in more processes than cores, for what starts a federation waits much of the time. A file's
# tests run in one of them. PYTEST_OPTIONS='-k apple' runs a part of it; SILOFL_DATA names a folder of public data sets.
PROCESSES ?= 3
PYTEST := $(BIN)/python -m pytest --timeout=600 -n $(PROCESSES) --dist loadfile --no-loadscope-reorder
unexport PYTHONDONTWRITEBYTECODE # each of some hundred processes would compile every module anew
test: check
	$(PYTEST) $(PYTEST_OPTIONS)

# And the containers, which need a Docker engine or root, and the drills (an hour). What .ci/run runs: LEFT_OUT='drill'.
LEFT_OUT ?=
test-all: check
	$(PYTEST) -m "$(if $(LEFT_OUT),not ($(LEFT_OUT)))" $(PYTEST_OPTIONS)

# Processes that are killed and lines that are cut in the middle of a run; docs/reliability.md has what came of it.
drills: install
	$(BIN)/python -m pytest --timeout=600 -m drill tests/server/deploy

# Which lines and branches of the five packages the suite reaches, in its processes, too.
coverage: install
	$(PYTEST) --cov --cov-report=term:skip-covered $(PYTEST_OPTIONS)

# Twelve silos and a server on this machine, three methods, runs/demo/report.html; a few minutes.
demo: install
	.ci/demo.sh $(BIN)/silofl

# The README's picture, of the report that `make demo` wrote; needs Chromium.
PICTURE ?= docs/images/report.png
picture: install
	PYTHONPATH=. $(BIN)/python .ci/picture.py runs/demo $(PICTURE)

# The short set of benchmarks, in turns, as ratios; see benchmarks/README.md.
bench: install
	$(BIN)/python -m benchmarks.engine floor methods --repeats 5

# The reference table of docs/reference-table.md, in two processes; the same command goes on with it, from the published
# cells; TABLE_FROM= starts anew.
FORM ?= long
TABLE ?= runs/reference-table-$(FORM)
TABLE_FROM ?= --from docs
REFERENCE := OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.reference --out $(TABLE) --form $(FORM) $(TABLE_FROM)
table: install
	$(REFERENCE) & $(REFERENCE); wait
	$(REFERENCE) --page docs

# The documentation with an API reference, in site/; a broken link or a missing reference fails. MkDocs reads the code and
# does not import it, so its environment holds the extra `docs` of pyproject.toml alone.
DOCS := .venv-docs
$(DOCS)/ready: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --no-deps --no-build-isolation --only-binary :all: --require-hashes --requirement $<
	touch $@

docs: $(DOCS)/ready
	$(DOCS)/bin/mkdocs build --strict

# dist/: what the images have of Python packages, in CycloneDX; docs/security.md says what is in it.
sbom: install
	$(BIN)/python -m requirements.sbom dist

# dist/: sdist, wheel and SBOM of the version in pyproject.toml. The test installs the same wheel into an empty environment.
release: check
	rm -rf build dist
	mkdir dist
	$(BIN)/python -c 'from setuptools import build_meta as b; b.build_sdist("dist"); b.build_wheel("dist")'
	$(BIN)/python -m requirements.sbom dist
	rm -rf build
	$(BIN)/python -m pytest -q -m "" tests/test_release.py
	@echo "dist/ holds the release; CHANGELOG.md says what is in it"

clean:
	rm -rf $(VENV) $(DOCS) site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .coverage*
