# `make demo` and `make test` install what they need into .venv; the stamp makes a second run quick.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
STAMP := $(VENV)/.installed

.PHONY: demo test pytest test-slow test-gpu lint style types bench docs screens browser clean

demo: $(STAMP)
	$(BIN)/pmae demo

# Style is checked at once. Types take most of a minute of one core the first time, so they are checked beside the tests.
test: style browser
	$(MAKE) --no-print-directory --jobs 2 types pytest

# Three workers of one thread each, as they often wait, and threads that sleep instead of spinning while they do.
# Compiled modules are kept, whatever the environment says: the processes that tests start would compile them again.
pytest: $(STAMP)
	PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Fifty kills at moments and fifty at writes, 10,000 damaged files of each of 16 kinds and 100,000 damaged run
# folders, four processes and clusters: hours on two cores.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# On a machine with a GPU; writes what it measured to results/gpu-tests.md.
test-gpu: $(STAMP)
	PMAE_GPU_REPORT=results/gpu-tests.md $(BIN)/python -m pytest -m gpu -n 8 tests/gpu

lint: style types

style: $(STAMP)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/pca.py
	$(BIN)/python -m benchmarks

docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build

# The pictures of the site and of README: figures of the method, and pages in a real browser.
screens: $(STAMP) browser
	$(BIN)/python docs/figures.py
	test -e runs/demo/features.safetensors || $(BIN)/pmae demo
	$(BIN)/python docs/screens.py runs/demo

$(STAMP): pyproject.toml
	$(shell command -v $(PYTHON) || command -v python3) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# The report page is tested in a real Chromium. Where none is installed, try Debian's; without one that test is skipped.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium chromium-driver >/dev/null; } \
	  || echo "no Chromium here: the test of the report page in a browser is skipped"

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
