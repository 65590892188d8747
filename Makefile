# make demo: run the quick-start notebook in a real kernel and show what the guard did
# make lab:  open JupyterLab on it
# make test: lint, types and all tests, in environments that it makes itself
# make test-libraries: the libraries that people train with, each put through the same trials, in an environment of its own
# make bench: every promised figure, side by side with plain torch
# make soak: press the stop button 1,000 times in 50 kernels, and count the presses that are lost (PRESSES=200 KERNELS=10 BUSY=4)

PYTHON ?= python3
VENV := .venv
VENV6 := .venv-ipykernel6
VENV_LIBRARIES := .venv-libraries
TORCH ?= torch==2.13.0

# environments are made side by side
MAKEFLAGS += --jobs=2

.PHONY: demo lab test test-libraries bench soak lint bytecode chromium clean

$(VENV)/demo-ready: setup.cfg
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet "$(TORCH)"
	$(VENV)/bin/python -m pip install --quiet -e ".[demo]"
	touch $@

# fastai asks for torchvision, which may have no build for this torch, and would then bring another torch along; it works without
NEEDS := tests/libraries/requirements.txt
FASTAI_NEEDS := tests/libraries/requirements-fastai.txt
$(VENV)/dev-ready: $(VENV)/demo-ready setup.cfg $(FASTAI_NEEDS)
	$(VENV)/bin/python -m pip install --quiet "$(TORCH)" -e ".[dev]" -r $(FASTAI_NEEDS)
	$(VENV)/bin/python -m pip install --quiet --no-deps fastai
	touch $@

# many of the tests once more with the oldest series that are supported; torch is the same
OLDEST := "ipykernel==6.29.*" "ipython==8.18.*" "ipywidgets==8.0.*" "traitlets==5.9.*" "psutil==5.9.*" "cloudpickle==3.0.*"
$(VENV6)/oldest-ready: setup.cfg
	$(PYTHON) -m venv $(VENV6)
	$(VENV6)/bin/python -m pip install --quiet "$(TORCH)"
	$(VENV6)/bin/python -m pip install --quiet $(OLDEST)
	touch $@

# after the other one: both write into the same folder
$(VENV6)/ready: $(VENV6)/oldest-ready | $(VENV)/dev-ready
	$(VENV6)/bin/python -m pip install --quiet $(OLDEST) -e .
	touch $@

$(VENV_LIBRARIES)/ready: setup.cfg $(NEEDS) $(FASTAI_NEEDS)
	$(PYTHON) -m venv $(VENV_LIBRARIES)
	$(VENV_LIBRARIES)/bin/python -m pip install --quiet "$(TORCH)"
	$(VENV_LIBRARIES)/bin/python -m pip install --quiet "$(TORCH)" -e . -r $(NEEDS)
	$(VENV_LIBRARIES)/bin/python -m pip install --quiet --no-deps fastai
	touch $@

demo: $(VENV)/demo-ready
	$(VENV)/bin/python notebooks/run.py notebooks/quickstart.ipynb

lab: $(VENV)/demo-ready
	$(VENV)/bin/jupyter lab notebooks/quickstart.ipynb

lint: $(VENV)/dev-ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# the browser of the tests; Playwright's own is not needed
chromium:
	@command -v chromium > /dev/null || command -v google-chrome > /dev/null || { \
	  echo "installing Chromium with apt-get"; as_root=$$(test $$(id -u) = 0 || echo sudo); \
	  $$as_root apt-get -qq update && \
	  DEBIAN_FRONTEND=noninteractive $$as_root apt-get -qq install -y --no-install-recommends chromium chromium-driver > /dev/null; }

# an installed package has its bytecode; here, hundreds of kernels and workers would compile it anew
bytecode: $(VENV)/dev-ready
	$(VENV)/bin/python -m compileall -q jupyter_loaderguard tests benchmarks

# most tests wait, and are run side by side; those that measure how fast something is have the machine for themselves
PYTEST := LOADERGUARD_IPYKERNEL6_PYTHON=$(CURDIR)/$(VENV6)/bin/python $(VENV)/bin/python -m pytest
test: lint bytecode $(VENV6)/ready chromium
	$(PYTEST) -m "not quiet" -n 2 --dist loadfile --no-loadscope-reorder
	$(PYTEST) -m quiet

# two at a time: most of it is imports and trainings, which want a core each
test-libraries: $(VENV_LIBRARIES)/ready
	LOADERGUARD_LIBRARIES=all $(VENV_LIBRARIES)/bin/python -m pytest tests/libraries -n 2 --dist loadfile

bench: bytecode chromium
	$(VENV)/bin/python -m benchmarks

# one kernel in five is of the oldest series that is supported
PRESSES ?= 1000
KERNELS ?= 50
BUSY ?= 0
soak: bytecode $(VENV6)/ready
	$(VENV)/bin/python -m benchmarks.soak --presses $(PRESSES) --kernels $(KERNELS) --busy $(BUSY) \
	  --python $(VENV)/bin/python --every-fifth $(VENV6)/bin/python

clean:
	rm -rf $(VENV) $(VENV6) $(VENV_LIBRARIES) build dist *.egg-info
