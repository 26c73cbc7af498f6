# The commands of the README are `make demo`, `make test` and `make docs`; each installs what it needs, once.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LIGHT := $(VENV)/.light

# Tests start thousands of interpreters: where the environment forbids bytecode, each would compile the sources again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo docs test collected check chromium ffmpeg stress floors release bench bench-peers clean

setup: $(READY)

# `make setup HASHES=hashes.txt` first installs everything but torch from files whose digests are known.
HASHES ?=
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(HASHES),$(PIP) --require-hashes --no-deps --requirement $(HASHES))
	$(if $(HASHES),which cc gcc clang | grep -q . || $(PIP) --require-hashes --no-deps --requirement .ci/compiler.txt)
	$(PIP) --constraint constraints.txt $(if $(HASHES),--no-build-isolation) --editable '.[all,dev,docs]'
	touch $(READY)

# The demo needs half of that, and comes first on a new machine: `make test` adds the rest. Modules are compiled when they are
# first imported: pip would spend half its time on those of torch that never are.
$(LIGHT): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile --constraint constraints.txt --editable '.[torch,text]'
	touch $(LIGHT)

demo: $(or $(wildcard $(READY)),$(LIGHT))
	$(BIN)/python examples/demo/demo.py

# The site, into site/. A link that leads nowhere is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean --quiet
	@echo "The site is in site/: open site/index.html"

# The checks keep one processor busy; meanwhile the other compiles the tests, as each process of pytest would by itself.
test: setup chromium ffmpeg
	$(MAKE) --jobs=2 --output-sync=target check collected
	$(BIN)/pytest

collected: setup
	-@$(BIN)/pytest --collect-only -qq -n 0 >/dev/null

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The report is tested in a browser; where it is not and cannot be installed, those tests are skipped, and say so.
chromium:
	@which chromium chromium-browser google-chrome 2>/dev/null | grep -q . \
	|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && export DEBIAN_FRONTEND=noninteractive \
	     && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
	|| echo "Chromium is not here and cannot be installed: tests of the report in a browser are skipped."

# The same for ffmpeg, whose libraries torchcodec needs: tests read the same clips with it.
ffmpeg:
	@which ffmpeg 2>/dev/null | grep -q . \
	|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && export DEBIAN_FRONTEND=noninteractive \
	     && apt-get update -qq && apt-get install -y -qq --no-install-recommends ffmpeg >/dev/null; } \
	|| echo "ffmpeg is not here and cannot be installed: tests that compare clips with torchcodec's are skipped."

stress: setup
	$(BIN)/pytest -m stress

# The oldest versions that pyproject.toml allows; of torch, whose old builds for CPUs alone PyPI does not have, the pinned one.
FLOORS := .venv-floors
KEEP ?= torch
floors:
	$(PYTHON) -m venv --clear $(FLOORS)
	$(PYTHON) .ci/floors.py $(addprefix --keep ,$(KEEP)) > $(FLOORS)/constraints.txt
	$(FLOORS)/bin/pip install --quiet --disable-pip-version-check --constraint $(FLOORS)/constraints.txt \
		--editable '.[all]' $$($(PYTHON) .ci/floors.py --tools)
	$(FLOORS)/bin/pytest $$($(PYTHON) .ci/floors.py --tests)

# What would be uploaded, tried in empty environments with every Python of these that is here, and with the oldest versions.
PYTHONS ?= python3.11 python3.12 python3.13
release: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	for python in $(PYTHONS); do \
		$$python --version >/dev/null 2>&1 || { echo "$$python is not here: not tried."; continue; }; \
		for package in dist/*; do $$python .ci/try_package.py $$package || exit 1; done; \
	done
	$(PYTHON) .ci/floors.py $(addprefix --keep ,$(KEEP)) > $(VENV)/oldest.txt
	$(PYTHON) .ci/try_package.py dist/*.whl $(VENV)/oldest.txt

bench: setup
	for script in benchmarks/bench_*.py; do $(BIN)/python $$script || exit 1; done

# Penstock beside what else people use: docs/side-by-side.md and its figures. One question: make bench-peers QUESTION=1
# Wheels of torchvision want torch with CUDA. MosaicML needs one that imports without (0.15.2 is the last). LitData brings a new
# one, which is taken away and kept apart, because other libraries break where it is installed and does not import.
PEERS := .venv-bench
QUESTION ?=
bench-peers:
	$(MAKE) --jobs=2 $(PEERS)/common/.ready $(PEERS)/apart/.ready
	$(PEERS)/common/bin/python benchmarks/peers/all.py $(QUESTION)

$(PEERS)/%/.ready: benchmarks/peers/%.txt
	$(PYTHON) -m venv --clear $(PEERS)/$*
	$(PEERS)/$*/bin/pip install --quiet --disable-pip-version-check --no-compile --requirement $<
	$(if $(filter apart,$*),,$(PEERS)/$*/bin/pip install --quiet --no-compile --constraint $< --editable '.[torch,text,images,service,s3]')
	$(if $(filter apart,$*),,$(PEERS)/$*/bin/pip uninstall --quiet --yes torchvision)
	$(PEERS)/$*/bin/pip install --quiet --no-deps --no-compile \
		$(if $(filter apart,$*),torchvision==0.15.2,--target $(PEERS)/torchvision torchvision==0.28.0)
	touch $@

clean:
	rm -rf $(VENV) $(FLOORS) $(PEERS) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
