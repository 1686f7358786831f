# make audit | documents | test | test-all | mutants | lab | notebooks: each installs into .venv what it needs.
# Needs Python 3.11, 3.12 or 3.13 and a network. Another Python beside it: make test PYTHON=python3.12 VENV=.venv-3.12
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
SEED ?= 0
# Much of what is installed is never loaded; the rest is compiled when it first is, and kept.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: audit documents test test-all mutants lab notebooks clean

# Into runs/, which git ignores.
audit: $(VENV)/for-audit
	$(BIN)/bi-audit run --jobs $(JOBS)

# The same into audits/, as they are committed.
documents: $(VENV)/for-audit
	$(BIN)/bi-audit run --publish --jobs $(JOBS)

# On the CPU and the interpreter, whatever the machine has: the committed notebooks carry CPU outputs. A file is one
# worker's, in the order given: notebooks, of seconds each, come last, so that no worker waits long for the other.
PYTEST := CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile \
	--no-loadscope-reorder --nbval-lax
test: $(VENV)/for-test
	$(PYTEST) -m "not slow" tests notebooks

# What is marked slow too, as every notebook and its long form: before reports are published, and once a week.
test-all: $(VENV)/for-test
	$(PYTEST) tests notebooks

# Bugs planted in our own kernels: how many do the audits catch?
mutants: $(VENV)/for-audit
	$(BIN)/bi-audit mutate --sample 100 --seed $(SEED) --device cpu --jobs $(JOBS)

lab: $(VENV)/for-lab
	$(BIN)/jupyter lab notebooks

# Runs the notebooks in place, as they are committed.
notebooks: $(VENV)/for-audit
	CUDA_VISIBLE_DEVICES= $(BIN)/jupyter nbconvert --to notebook --execute --inplace \
		--ExecutePreprocessor.record_timing=False notebooks/*.ipynb

audit_extras := audit,transformers
test_extras := test
lab_extras := lab,transformers
$(VENV)/for-%: pyproject.toml constraints.txt
	@echo "Installing into $(VENV) what make $* needs: about a minute, and up to two gigabytes of packages"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, not " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[$($*_extras)]'
	touch $@

clean:
	rm -rf $(VENV)
