# Two commands matter: `make train` and `make test`. Each creates .venv and installs what is missing first.

PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3.14 python3; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$python"; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
# Pins hold for what is installed and for what builds it (older pip reads the first name, newer pip both).
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start many interpreters: where compiled modules are not kept, each compiles ours again, and every test file.
unexport PYTHONDONTWRITEBYTECODE
# Linux without a GPU: `make train TORCH_INDEX=…` takes torch's small CPU build; docs/reference/machines.md says which address.
PIP := $(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# The last four are frameworks whose programs the tests run beside ours; the package itself needs none of them.
DEV_TOOLS := pytest pytest-timeout pytest-xdist filelock hypothesis ruff mypy import-linter nbclient ipykernel build transformers accelerate lightning tensorboard
# Few tests keep a core busy from beginning to end: three files at a time fill two cores.
THREE_FILES_AT_A_TIME := -n 3 --dist loadfile --no-loadscope-reorder
DOCS_TOOLS := mkdocs mkdocs-material mkdocstrings[python]
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

.PHONY: help exercises train test test-full lint format docs docs-serve clean
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

train: $(VENV)/.installed ## Train the 16-layer MLP on handwritten digits with 4 ranks (ARGS="--ranks 2 …" to change it)
	@$(BIN)/microparallel train $(if $(ARGS),$(ARGS),--ranks 4)

test: $(VENV)/.installed-dev $(VENV)/.installed-docs ## Run the tests
	@$(BIN)/python -m pytest $(or $(ARGS),$(THREE_FILES_AT_A_TIME))

test-full: $(VENV)/.installed-dev $(VENV)/.installed-docs ## Run the tests and the slow ones, with everything in processes of its own
	@$(BIN)/python -m pytest -m 'slow or not slow' --fresh $(or $(ARGS),-n 2 --dist loadfile --no-loadscope-reorder)

lint: $(VENV)/.installed-dev ## Check style, types and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(VENV)/.installed-dev ## Rewrite the code in the project's style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(VENV)/.installed-docs ## Build the course into site/; open site/index.html, no server needed
	@$(BIN)/python docs/tools/from_npm.py
	@$(MKDOCS) build --strict --quiet
	@echo "built: open site/index.html; the playground runs Python, which needs a server: microparallel studio"

docs-serve: $(VENV)/.installed-docs ## Show the course while you write it, at localhost:8000
	@$(BIN)/python docs/tools/from_npm.py
	@$(MKDOCS) serve --watch src --watch examples $(ARGS)

clean: ## Remove what the other commands created (not runs/)
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; install one, or run make PYTHON=/path/to/python3" >&2; exit 2; }
	@echo "creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing microparallel into $(VENV) (the first time takes a minute or two)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the development tools"
	@$(PIP) $(DEV_TOOLS)
	@touch $@

exercises: $(VENV)/.installed ## Make exercises/ anew from exercises/solutions/
	@$(BIN)/python -m microparallel.learn.holes

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "installing the tools of the course's site"
	@$(PIP) $(DOCS_TOOLS)
	@touch $@
