# Needs: make and Python 3.11 or newer. Everything is installed into $(VENV); nothing else on the machine changes.
#   make train                                          install, then train the digits model
#   make train ARGS="strategy=ddp trainer.devices=2"    the same with Hydra overrides
#   make test                                           install, then the default test suite
# Options: PYTHON=python3.12 (which interpreter), VENV=.venv (where), PIP_ARGS="…" (passed to pip install, for
# instance --extra-index-url https://download.pytorch.org/whl/cpu for the small CPU build of torch), WORKERS=8 (how many
# tests run at once).

VENV ?= .venv
ARGS ?=
PIP_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

# The first interpreter that really starts and is new enough (a pyenv shim may exist and refuse to start).
ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3.12 python3 python3.13 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
endif

.DEFAULT_GOAL := help
.PHONY: help install train demo test test-slow test-all test-full test-colossalai test-newest test-oldest docs lint format
.PHONY: keep-losses gpu-check gpu-site gpu-wheels constraints clean

help:
	@echo "make train [ARGS=\"hydra overrides\"]   set up $(VENV) and train the default model"
	@echo "make demo                              teach the digits model a subject on a page in the browser"
	@echo "make test                              set up $(VENV) and run the default tests (minutes)"
	@echo "make test-slow                         what must pass before a change lands, beside the default tests"
	@echo "make test-all                          both in one session"
	@echo "make test-full PART=matrix             a part of the rest; without PART, the names of the parts"
	@echo "make test-colossalai                   install ColossalAI into $(VENV), and run its tests"
	@echo "make test-newest | test-oldest         the default tests with the newest releases, or with the oldest allowed ones"
	@echo "make docs                              build the guides and the API reference into build/site"
	@echo "make gpu-check PART=smoke              ten minutes of what needs one CUDA GPU; without PART, the names"
	@echo "make gpu-wheels [WHEELS=folder]        what a GPU machine without a network needs, as wheels"
	@echo "make constraints                       pin what $(VENV) holds now in constraints.txt"
	@echo "make keep-losses                       write the losses that tests compare with again, after a change on purpose"
	@echo "make lint | format                     ruff and mypy | ruff format"
	@echo "make install | clean                   only set up $(VENV) | remove what builds and caches left"

%/bin/python:
	@test -n "$(PYTHON)" || { echo "make: found no Python 3.11 or newer; install one or pass PYTHON=/path/to/python3.12" >&2; exit 2; }
	@echo "==> creating $* with $(PYTHON)"
	"$(PYTHON)" -m venv "$*"

# DS_BUILD_OPS=0: deepspeed compiles its kernels when they are first used, not here.
# For one test, in a process of its own: it needs torchvision, which fits one build of torch, or breaks Lightning.
TORCH_FIDELITY := build/torch-fidelity
$(STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "==> installing sd_lightning and the tested versions of constraints.txt into $(VENV); PyTorch is a large download"
	DS_BUILD_OPS=0 $(RUN) -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[all,test]'
	$(RUN) -m pip install --disable-pip-version-check $(PIP_ARGS) -q --no-deps --upgrade --target "$(TORCH_FIDELITY)" -c constraints.txt torch-fidelity
	@touch "$(STAMP)"

install: $(STAMP)

train: $(STAMP)
	$(RUN) -m sd_lightning.train $(ARGS)

# Without photos and without a GPU: the digits model, and a page on which it is taught a drawn glyph.
demo: $(STAMP)
	@test -f runs/tiny-digits/summary.json || $(RUN) -m sd_lightning.train
	$(RUN) -m sd_lightning.ui $(ARGS)

# Files are begun in the order of conftest.py.
IN_WORKERS = $(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "$(1)not alone and not gpu"
ALONE = $(RUN) -m pytest -m "$(1) and alone and not gpu"

DEFAULT_TESTS = $(call IN_WORKERS,not slow and ) --ignore=tests/strategies/test_colossalai.py $(PYTEST_ARGS)

test: $(STAMP)
	$(DEFAULT_TESTS)

# In one session: what the files import, and what their modules prepare, is needed once.
test-all: OF_WORKERS =
test-slow: OF_WORKERS = slow and
test-all test-slow: $(STAMP)
	status=0; $(call IN_WORKERS,$(OF_WORKERS) ) --ignore=tests/strategies/test_colossalai.py $(PYTEST_ARGS) || status=$$?; \
	$(call ALONE,slow) --ignore=tests/strategies/test_colossalai.py $(PYTEST_ARGS) || status=$$?; exit $$status

# RESULTS=benchmarks/results keeps a line about it.
TO_RESULTS = $(if $(RESULTS),--results="$(RESULTS)")
test-full: $(STAMP)
	status=0; $(call IN_WORKERS,full and ) --part="$(PART)" $(TO_RESULTS) $(PYTEST_ARGS) || [ $$? = 5 ] || status=1; \
	$(call ALONE,full) --part="$(PART)" $(TO_RESULTS) $(PYTEST_ARGS) || [ $$? = 5 ] || status=1; exit $$status

# With its dependencies it would replace torch, diffusers and transformers by old releases: docs/colossalai.md.
COLOSSALAI := colossalai==0.5.0 galore-torch==1.0 peft einops
test-colossalai: $(STAMP)
	$(RUN) -m pip install --disable-pip-version-check $(PIP_ARGS) --no-deps $(COLOSSALAI)
	$(RUN) -m pytest -m "not gpu" tests/strategies/test_colossalai.py $(PYTEST_ARGS)

# Name the change in CHANGELOG.md.
keep-losses: $(STAMP)
	$(RUN) tests/support/kept_losses.py

# Other releases than those of constraints.txt, each set in an environment of its own. NEWEST_ARGS and OLDEST_ARGS are
# further requirements: NEWEST_ARGS='torch==2.13.0' holds torch, and all else is the newest.
NEWEST_VENV ?= .venv-newest
NEWEST_ARGS ?=
test-newest: RUN = $(NEWEST_VENV)/bin/python
test-newest: | $(NEWEST_VENV)/bin/python
	DS_BUILD_OPS=0 $(RUN) -m pip install --disable-pip-version-check $(PIP_ARGS) --upgrade --upgrade-strategy eager \
		-e '.[all,test]' $(NEWEST_ARGS)
	$(DEFAULT_TESTS)

OLDEST_VENV ?= .venv-oldest
OLDEST_ARGS ?=
test-oldest: RUN = $(OLDEST_VENV)/bin/python
test-oldest: | $(OLDEST_VENV)/bin/python
	@mkdir -p build
	$(RUN) .ci/oldest.py $(OLDEST_ARGS) > build/oldest.txt
	DS_BUILD_OPS=0 $(RUN) -m pip install --disable-pip-version-check $(PIP_ARGS) -c build/oldest.txt -e '.[all,test]'
	$(DEFAULT_TESTS)

# The site of docs/ and of the docstrings. --strict: a warning, such as of a link that leads nowhere, is an error. The
# variable silences the theme's notice of its own end of life, in May 2027.
docs: $(STAMP)
	$(RUN) -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy -n $(WORKERS)

format: $(STAMP)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# Without WHEELS, the virtual environment. With it, GPU_PYTHON as it is on a machine that has CUDA, torch and lightning
# but no network; what is missing there comes from that folder of wheels, which `make gpu-wheels` fills.
# GPU_RESULTS=folder takes the figures where they outlive a borrowed machine; GPU_COMMIT names the commit where there is no
# git; GPU_SECONDS is when everything is stopped; DRY=1 runs the same on a CPU, tiny; PYTEST_ARGS chooses among the tests.
GPU_RESULTS ?= benchmarks/results
GPU_SECONDS ?= 520
GPU_PYTHON ?= python3
ifdef WHEELS
GPU_SITE := $(CURDIR)/build/gpu-site
GPU_RUN := PYTHONPATH="$(GPU_SITE):$(CURDIR)/src:$$PYTHONPATH" "$(GPU_PYTHON)"
gpu-check: gpu-site
else
GPU_RUN := $(RUN)
gpu-check: $(STAMP)
endif
gpu-check: export PYTEST_ARGS := $(PYTEST_ARGS)
gpu-check:
	@$(GPU_RUN) benchmarks/gpu_check.py $(PART) --results "$(GPU_RESULTS)" --seconds $(GPU_SECONDS) $(if $(DRY),--dry)

gpu-site:
	@echo "==> installing the wheels of $(WHEELS) into $(GPU_SITE)"
	@rm -rf "$(GPU_SITE)"
	"$(GPU_PYTHON)" -m pip install -q --no-index --no-deps --no-compile --target "$(GPU_SITE)" "$(WHEELS)"/*.whl

gpu-wheels: $(STAMP)
	$(RUN) benchmarks/gpu_wheels.py "$(or $(WHEELS),.whl)"

# Pins what $(VENV) holds now; to move to newer versions, upgrade there, run the tests, then this.
constraints:
	@{ grep '^#' constraints.txt; $(RUN) -m pip freeze --exclude-editable --exclude sd-lightning --exclude setuptools --exclude wheel \
		| grep -viE '^(triton|nvidia[-_].*)==' | sed -E 's/[+][A-Za-z0-9._]+$$//'; } > constraints.txt.new
	mv constraints.txt.new constraints.txt

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./.venv*" -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
