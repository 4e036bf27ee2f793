# `make demo` and `make test` set up .venv themselves, on a machine with or without a GPU.
# `make gpu` runs the native suite with the Python at hand and installs nothing but this package.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGE_FOLDERS := graphengine kernels buckets profiles


.PHONY: demo test lint types tests engine-tests speculation-tests session-tests other-tests \
	interpreter gpu sanitize install

demo: install
	$(BIN)/graphengine generate --checkpoint demo --max-tokens 120 --temperature 0.7 --seed 7 \
		--prompt 'def read_lines(path):'

# The last five on two cores, the longest first and the shortest last.
test: install lint types
	$(MAKE) -j2 --output-sync=target engine-tests interpreter speculation-tests \
		other-tests session-tests

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy -p graphengine -p graphengine.kernels -p graphengine.buckets \
		-p graphengine.profiles

tests: engine-tests speculation-tests session-tests other-tests

engine-tests:
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/graphengine \
		--ignore-glob '*/test_speculati*' --ignore-glob '*/test_sessions*'

speculation-tests:
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/graphengine/test_speculati*.py

session-tests:
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/graphengine/test_sessions*.py

other-tests:
	OMP_NUM_THREADS=1 $(BIN)/pytest --ignore tests/graphengine

interpreter:
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/pytest tests/kernels

install: $(VENV)/stamp
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable . \
		--config-settings editable_mode=strict

$(VENV)/stamp: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt triton setuptools wheel
	$(BIN)/pip install --quiet --constraint constraints.txt numpy safetensors tokenizers \
		jinja2 nvtx matplotlib huggingface_hub transformers llguidance jsonschema pytest hypothesis ruff mypy
	touch $@

# Tests mostly wait for the compiler and for the host, so that files run side by side; exit status 5
# says that one holds no test for a GPU.
gpu:
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation --editable .
	ls tests/*/test_*.py tests/test_*.py | xargs -P 8 -I{} sh -c \
		'$(PYTHON) -m pytest -q -m "gpu and not alone" {} || test $$? = 5'
	$(PYTHON) -m pytest -m "gpu and alone" tests/graphengine tests/buckets tests/profiles tests/testing

# compute-sanitizer over all kernels and four short engines; SANITIZE takes the script's options.
sanitize:
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(PYTHON) tests/support/sanitizing.py $(SANITIZE)
