# make audit | documents | test | test-all | mutants | lab: each sets up .venv first. Needs Python 3.11, 3.12 or 3.13 and a network.
# Another Python beside it: make test PYTHON=python3.12 VENV=.venv-3.12
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
# Much of what is installed is never loaded; the rest is compiled when it first is, and kept.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: audit documents test test-all mutants lab notebooks clean

# Into runs/, which git ignores.
audit: $(VENV)/installed
	$(BIN)/bi-audit run --jobs $(JOBS)

# The same into audits/, as they are committed.
documents: $(VENV)/installed
	$(BIN)/bi-audit run --publish --jobs $(JOBS)

# On the CPU and the interpreter, whatever the machine has: the committed notebooks carry CPU outputs.
PYTEST := CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile \
	--no-loadscope-reorder --nbval-lax
test: $(VENV)/installed
	$(PYTEST) --without-slow tests notebooks

# Besides, what is marked slow, and every notebook: before documents are published, and once a week.
test-all: $(VENV)/installed
	$(PYTEST) tests notebooks

# Bugs planted in our own kernels: how many do the audits catch?
SEED ?= 0
mutants: $(VENV)/installed
	$(BIN)/bi-audit mutate --sample 100 --seed $(SEED) --device cpu --jobs $(JOBS)

lab: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lab]'
	$(BIN)/jupyter lab notebooks

# Runs the notebooks in place, as they are committed.
notebooks: $(VENV)/installed
	CUDA_VISIBLE_DEVICES= $(BIN)/jupyter nbconvert --to notebook --execute --inplace \
		--ExecutePreprocessor.record_timing=False notebooks/*.ipynb

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): a minute or two, and two gigabytes of packages"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, not " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[test,transformers]'
	touch $@

clean:
	rm -rf $(VENV)
