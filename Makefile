# A Debian or Ubuntu machine with git, make and Python 3.11 or newer (python3-venv) is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install lock check settings test drills demo bench clean

install: $(VENV)/ready

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11: make PYTHON=python3.12 names another" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# By version and SHA-256, as in the images: requirements/.
$(VENV)/ready: pyproject.toml $(wildcard requirements/*) | $(BIN)/python
	@echo "installing silofl and what it needs into $(VENV); the first time this takes minutes"
	PYTHON=$(BIN)/python sh requirements/install.sh dev
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Write down anew what is installed, after a change of pyproject.toml; UPGRADE=1 moves every version to the newest that
# fits. With another version of PyTorch: TORCH_INDEX=URL, the index of its CPU builds.
lock:
	$(BIN)/python requirements/lock.py $(if $(UPGRADE),--upgrade) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Write down what the code declares: settings (pyproject.toml, docs/settings.md), what each method shows (docs/privacy.md).
settings: install
	$(BIN)/python -m strategies.base.run_settings --write
	$(BIN)/python -m strategies.base.declarations --write

# The whole suite, in two processes, a file in one of them: what starts a federation waits most of the time.
# PYTEST_OPTIONS='-k apple' runs a part of it; SILOFL_DATA names a folder of public data sets.
test: check
	$(BIN)/python -m pytest --timeout=600 -n 2 --dist loadfile $(PYTEST_OPTIONS)

# Processes that are killed and lines that are cut in the middle of a run; docs/reliability.md has what came of it.
drills: install
	$(BIN)/python -m pytest --timeout=600 -m drill tests/server/deploy/test_drills.py tests/server/deploy/test_slow_link.py

# Twelve silos and a server on this machine, three methods, runs/demo/report.html; a few minutes.
demo: install
	$(BIN)/python -m server.demo

# The short set of benchmarks, in turns, as ratios; see benchmarks/README.md.
bench: install
	$(BIN)/python -m benchmarks.engine floor methods algebra --repeats 5

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
