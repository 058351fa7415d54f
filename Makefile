# `make` lists the targets. Each one sets up the virtual environment first, if it is missing or out of date.

PYTHON ?= python3
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
TORCH := $(shell grep '^torch==' constraints.txt)
# These declare torchvision, or a package that does, which could replace torch: hence without dependencies.
ORACLES := $(shell grep -oE '^(asdfghjkl|backpack|curvlinops|laplace)[^ ]*' benchmarks/peers.txt)
# One thread for each test process: as many processes as cores, and sums that do not depend on the machine.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

# What a user may install beside the package itself.
EXTRAS := report cli table integrations
# Tests that need no more than that: not those of other peoples' curvatures, of the browser and of the documentation.
LOWEST := tests/cli tests/integrations tests/plots tests/tabular tests/influence/test_attribution.py tests/test_display.py \
  tests/io/test_forged.py tests/io/test_refusals.py \
  tests/io/test_round_trip.py tests/io/test_round_trip_models.py \
  tests/report/test_report.py tests/report/test_tables.py tests/test_results.py tests/test_sklearn.py
comma := ,
space := $() $()

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test portable docs lint licences advisories lowest format science fuzz bench soak wheel clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

setup: $(VENV)/.installed ## make the virtual environment in .venv, with pinned versions

demo: setup ## tell noise from scarcity on the digits: a table here, pictures in report.html
	$(BIN)/python -m whence_paper.demo

test: lint licences docs ## all that CI runs: lint, types, licences, the documentation, tests, doctests
	$(PYTEST)

# ONLY="aten-default threads-4" chooses settings (tools/portable.py --list), TESTS="tests/docs -k large" what is run.
portable: setup ## the tests under every code path of this CPU, one after the other; hours. ONLY=SETTINGS TESTS=PATHS
	$(BIN)/python tools/portable.py $(ONLY) -- -n $(JOBS) $(TESTS)

lint: setup ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

licences: setup ## refuse what comes with an installation under a licence that is not on the list
	$(BIN)/python tools/licences.py $(EXTRAS) > /dev/null

advisories: setup ## known vulnerabilities of what comes with an installation; an error where they cannot be looked up
	test -x build/audit/bin/pip-audit || $(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip --disable-pip-version-check install --quiet 'pip-audit>=2.7'
	$(BIN)/python tools/advisories.py build/audit/bin/pip-audit $(EXTRAS)

lowest: setup ## tests with the lowest versions that pyproject.toml allows, beside the pinned torch
	rm -rf build/lowest
	$(PYTHON) -m venv build/lowest
	$(BIN)/python tools/lowest.py $(EXTRAS) > build/lowest/constraints.txt
	build/lowest/bin/python -m pip --disable-pip-version-check install --quiet $(TORCH)
	build/lowest/bin/python -m pip --disable-pip-version-check install --quiet -c build/lowest/constraints.txt \
	  -e '.[$(subst $(space),$(comma),$(EXTRAS))]' hypothesis pytest pytest-xdist scipy statsmodels
	OMP_NUM_THREADS=1 build/lowest/bin/python -m pytest -n $(JOBS) -W ignore::DeprecationWarning $(LOWEST)

format: setup ## let ruff rewrite what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: setup ## build the documentation into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Seconds that problems are drawn for, in `make science` and in `make fuzz`, and the seed of the first.
FUZZ_SECONDS ?= 600
FUZZ_FIRST_SEED ?= 1000
science: setup ## the slow tests: simulations, retraining, coverage, drawn problems for FUZZ_SECONDS
	FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_FIRST_SEED=$(FUZZ_FIRST_SEED) $(PYTEST) -m slow

fuzz: setup ## networks, loaders and options at random, every number against dense algebra, for FUZZ_SECONDS
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m fuzz --seconds $(FUZZ_SECONDS) --first-seed $(FUZZ_FIRST_SEED) --jobs $(JOBS)

# DATA is a folder with uci/, mnist/, fashion-mnist/, cifar-10/ and california-housing/; benchmarks/data.py says in which form.
# Without it: random inputs for cost, and what comes with scikit-learn for quality and label errors. SIZE=full takes hours.
# A part that fails is told at the end and keeps none of the others back. Records go to out/, never to results/.
SIZE ?= small
ALL := $(filter full,$(SIZE))
bench: $(VENV)/.peers ## cost, quality and label errors beside the peers, small; DATA=FOLDER SIZE=full for all (see Makefile)
	@since=$$(date +%s); broken=; \
	echo "1 of 3: wrong labels, a line for each draw"; \
	$(BIN)/python -m benchmarks.label_errors $(if $(DATA),--data $(DATA)) \
	  $(if $(DATA),$(if $(ALL),,--cases digits mnist fashion-mnist),--cases digits) \
	  $(if $(ALL),,--seeds 200 --structures ekfac core:size=512) || broken="$$broken label_errors"; \
	echo "2 of 3: quality, a line for each data set, then who is ahead"; \
	$(BIN)/python -m benchmarks.quality_peers $(if $(DATA),--data $(DATA)) \
	  $(if $(ALL),,--splits 0 --draws 100) || broken="$$broken quality_peers"; \
	echo "3 of 3: cost, a line for each of M1 to M4 and each library; a line may take minutes"; \
	$(BIN)/python -m benchmarks.cost $(if $(DATA),--data $(DATA)) $(if $(ALL),,--small) || broken="$$broken cost"; \
	$(BIN)/python -m benchmarks.together out --since $$since --broken $$broken

soak: setup ## a hundred thousand predictions in small batches, for every structure: memory and answers
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.soak --out out/soak.json

wheel: setup ## build wheel and sdist into dist/, and try both in an environment of their own
	rm -rf dist build/smoke
	$(PIP) build
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv build/smoke
	build/smoke/bin/python -m pip --disable-pip-version-check install --quiet $(TORCH)
	build/smoke/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt "$$(ls dist/*.whl)[report,cli]"
	cd build && smoke/bin/python ../tests/packaging/smoke.py && smoke/bin/whence --version
	build/smoke/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --force-reinstall dist/*.tar.gz
	cd build && smoke/bin/python ../tests/packaging/smoke.py && smoke/bin/whence --version

clean: ## remove caches and outputs; the virtual environment stays
	rm -rf build dist out site report.html .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "whence needs Python 3.10 or newer as '$(PYTHON)'; choose one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "No virtual environment could be made. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

# torch comes first and alone: a plain `torch==` takes a CPU build where pip is set up to find one, and nothing that is
# installed later replaces it.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV); this takes a minute or more the first time."
	$(PIP) $(TORCH)
	$(PIP) -c constraints.txt -e '.[dev]'
	$(PIP) --no-deps $(ORACLES)
	@touch $@

$(VENV)/.peers: $(VENV)/.installed benchmarks/peers.txt
	$(PIP) -c constraints.txt -e '.[bench]'
	$(PIP) --no-deps -r benchmarks/peers.txt
	@touch $@
