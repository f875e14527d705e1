# Everything runs in .venv, which `make setup` fills on first use and after a change of pyproject.toml.
# Settings: PYTHON=python3.12 (which Python makes .venv), EXTRA=cpu|cuda12|cuda13 (which MLX on Linux),
# ARGS='--temp 0.7' (more arguments for chat, test and test-slow).

PY := .venv/bin/python
READY := .venv/.ready
ARGS ?=

# A .venv whose Python has been removed or upgraded away is made anew.
$(shell test -x $(PY) || rm -f $(READY))

.PHONY: help setup chat test test-slow format fmt lint type check wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## make .venv and install everything

chat: $(READY) ## talk with the built-in model (fetched on first use)
	@$(PY) -m mlx_redrafter chat $(ARGS)

test: $(READY) ## run the quick tests
	@$(PY) -m pytest -q -m "not slow" $(ARGS)

test-slow: $(READY) ## run the slow tests
	@$(PY) -m pytest -q -m slow $(ARGS)

format: $(READY) ## check the format
	@$(PY) -m ruff format --check .

fmt: $(READY) ## format, and mend what the linter can
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

lint: $(READY) ## run the linter
	@$(PY) -m ruff check .

type: $(READY) ## check the types
	@$(PY) -m mypy

check: format lint type test ## all that a change must pass

wheel: $(READY) ## build the source archive and the wheel into dist/
	@rm -rf dist
	@$(PY) -m build

clean: ## remove .venv and everything built
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The mark is taken away before anything changes and set at the end: without it .venv is made anew, so
# that an interrupted set-up is never built upon.
$(READY): pyproject.toml
	@set -e; \
	if [ -e $(READY) ]; then \
	  echo "Updating .venv"; rm -f $(READY); \
	else \
	  python=; \
	  for each in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	    if $$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      python=$$each; break; \
	    fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "error: no Python 3.11 or newer found: install one, or name it with make PYTHON=..." >&2; exit 1; \
	  fi; \
	  if ! $$python -c 'import venv, ensurepip' 2>/dev/null; then \
	    echo "error: $$python cannot make a virtual environment: apt install python3-venv" >&2; exit 1; \
	  fi; \
	  echo "Making .venv with $$($$python --version)"; \
	  $$python -m venv --clear .venv; \
	fi; \
	extra=$(EXTRA); \
	if [ -z "$$extra" ] && [ "$$(uname -s)" = Linux ]; then \
	  extra=cpu; \
	  if gpu=$$(nvidia-smi 2>/dev/null); then \
	    case "$$gpu" in \
	      *"CUDA Version: 12"*) extra=cuda12 ;; \
	      *"CUDA Version: 1"[3-9]*) extra=cuda13 ;; \
	    esac; \
	  fi; \
	fi; \
	pip="$(PY) -m pip install --quiet --disable-pip-version-check"; \
	echo "Installing mlx-redrafter$${extra:+ for $$extra} and its tools (a minute or two)"; \
	if [ "$$extra" = cpu ]; then \
	  $$pip -e '.[cpu,dev]' || { echo "Trying again without MKL"; $$pip -e '.[dev]' 'mlx[cpu]'; }; \
	else \
	  $$pip -e ".[$${extra:+$$extra,}dev]"; \
	fi; \
	$(PY) -c 'import mlx_redrafter'; \
	touch $(READY)
