# `make demo` and `make test` set up .venv themselves, on a machine with or without a GPU.
# `make gpu` runs the native suite with the Python at hand and installs nothing but this package.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without it pip compiles all that it installs; tests import a small part, and compile that once.
LAZY := --quiet --no-compile
EDITABLE := $(BIN)/pip install --quiet --no-deps --no-build-isolation --editable . \
	--config-settings editable_mode=strict
# The checks of `make test`. The first has two workers, and ends last, so that both cores have work.
CHECKS := tests types interpreter lint
# What else runs beside them: see .ci/run.
MORE :=

# Modules that one process compiled are read by the next ones, of which tests start many.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-long $(CHECKS) minimum newest peft other-capability gpu gpus sanitize docs pictures install

demo: $(VENV)/engine
	$(EDITABLE)
	$(BIN)/graphengine generate --checkpoint demo --max-tokens 120 --temperature 0.7 --seed 7 \
		--prompt 'def read_lines(path):'

# All of them run, whichever fail.
test: install
	$(BIN)/python tests/support/checks.py $(CHECKS) $(MORE)

# All of what `make test` tries a little of: examples, matrices, seeds.
test-long:
	GRAPHENGINE_LONG=5 $(MAKE) test MORE="$(MORE) peft"

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy -p graphengine -p graphengine.kernels -p graphengine.buckets \
		-p graphengine.profiles
	MYPYPATH=training $(BIN)/mypy -p demo_training
	$(BIN)/python tests/support/pages.py build/pages
	$(BIN)/mypy --strict build/pages examples tests/support/typed_calls.py

ENGINE_TESTS := tests/graphengine

tests:
	OMP_NUM_THREADS=1 $(BIN)/pytest --workers 2 tests

interpreter:
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/pytest tests/kernels

# A new environment over .venv: what it has not itself, torch for one, is found there.
define over_venv
	$(BIN)/python -m venv --clear --without-pip $(1)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		>$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/over.pth
endef

# The least versions that pyproject.toml admits.
MINIMUM := $(VENV)/minimum

minimum: install
	$(call over_venv,$(MINIMUM))
	$(BIN)/pip --python $(MINIMUM)/bin/python install $(LAZY) --only-binary :all: \
		--requirement constraints-minimum.txt
	$(BIN)/pip --python $(MINIMUM)/bin/python install --quiet --no-deps --no-build-isolation .
	OMP_NUM_THREADS=1 $(MINIMUM)/bin/python -m pytest tests/graphengine/text/test_text.py \
		tests/graphengine/test_prompts.py tests/graphengine/models/test_checkpoint.py \
		tests/graphengine/models/test_gguf_files.py \
		tests/graphengine/requests/test_guided.py tests/graphengine/observe/test_tracing.py \
		tests/profiles/runs/test_report_html.py \
		-k "not (drafts or checkpoints or missing_content or pauses or gate_changes or browser or \
		ngram or mtp or own or vanilla or choices_may)"
	OMP_NUM_THREADS=1 $(MINIMUM)/bin/python -m pytest tests/kernels/core/test_launching.py \
		tests/kernels/core/test_pdl_prefill.py tests/kernels/linear/test_linear_swiglu.py
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(MINIMUM)/bin/python -m pytest tests/kernels/sample

# The newest Triton that was tried: what it compiles, and what its interpreter computes.
NEWEST := $(VENV)/newest

newest: install
	$(call over_venv,$(NEWEST))
	$(BIN)/pip --python $(NEWEST)/bin/python install $(LAZY) --only-binary :all: --no-deps \
		--requirement constraints-newest.txt
	$(BIN)/pip --python $(NEWEST)/bin/python install --quiet --no-deps --no-build-isolation .
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest tests/test_gpus.py \
		tests/kernels/core/test_launching.py tests/kernels/attention/test_prefill_gluon.py \
		tests/kernels/linear/test_linear_swiglu.py
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(NEWEST)/bin/python -m pytest tests/kernels/sample

# Adapters against peft, which asks for much that nothing else here uses.
PEFT := $(VENV)/peft

peft: install
	$(call over_venv,$(PEFT))
	$(BIN)/pip --python $(PEFT)/bin/python install $(LAZY) --only-binary :all: \
		--constraint constraints.txt peft
	$(BIN)/pip --python $(PEFT)/bin/python install --quiet --no-deps --no-build-isolation .
	OMP_NUM_THREADS=1 $(PEFT)/bin/python -m pytest $(ENGINE_TESTS)/models/test_adapters_of_peft.py \
		$(ENGINE_TESTS)/models/test_adapter_files.py

# Of a machine without this one's vector units, whose sums are added up in another order.
other-capability: install
	ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=1 \
		$(BIN)/pytest $(ENGINE_TESTS)/models/test_parity.py $(ENGINE_TESTS)/program/test_roundings.py \
		$(ENGINE_TESTS)/program/test_option_parity.py \
		$(ENGINE_TESTS)/program/test_request_options.py \
		-k "roundings or (option_parity and demo and ((min_tokens and eagle) or swallows or \
		(seed_draws and ngram))) or \
		(are_those_of_transformers and demo and (allowed or repetition or all)) or \
		(test_parity and (greedy_tokens or mixed) and (demo or biases))"

# The documentation as a site in build/site, with warnings as errors, in an environment of its own.
DOCS := $(VENV)/docs

docs: $(DOCS)/stamp
	$(PYTHON) docs/site.py build/site-source
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# The pictures of docs/profiling.md.
pictures: install
	PYTHONPATH=tests/support $(BIN)/python tests/support/timelines/pictures.py profiles/pictures

# The folder of both environments is there before either is made: venv looks, and then makes it.
$(DOCS)/stamp:
	mkdir -p $(VENV)
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install $(LAZY) mkdocs-material==9.8.1 'mkdocstrings[python]'
	touch $@

install: $(VENV)/stamp
	$(EDITABLE)

# What an engine runs with, and nothing that only tests need.
$(VENV)/engine: constraints.txt pyproject.toml
	mkdir -p $(VENV)
	$(PYTHON) -m venv $(VENV)
	# The former name of this distribution: its files would stand in for the new ones.
	$(BIN)/pip uninstall -qq --yes graphengine
	$(BIN)/pip install $(LAZY) --constraint constraints.txt torch
	$(BIN)/pip install $(LAZY) --constraint constraints.txt triton setuptools wheel
	$(BIN)/pip install $(LAZY) --constraint constraints.txt numpy safetensors tokenizers jinja2 nvtx
	touch $@

$(VENV)/stamp: $(VENV)/engine
	$(BIN)/pip install $(LAZY) --constraint constraints.txt huggingface_hub transformers \
		compressed-tensors llguidance gguf jsonschema prompt_toolkit ray pytest hypothesis ruff \
		mypy
	touch $@

# Tests mostly wait for the compiler and for the host, so that files run side by side. NATIVE takes the
# script's options.
gpu:
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(PYTHON) tests/support/native.py $(NATIVE)

# What engines launch, compiled for every GPU from sm_80 on, without having one; GPUS takes the
# script's options.
gpus: install
	$(BIN)/python tests/support/gpus/table.py $(GPUS)

# compute-sanitizer over all kernels and four short engines; SANITIZE takes the script's options.
sanitize:
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(PYTHON) tests/support/sanitize.py $(SANITIZE)
