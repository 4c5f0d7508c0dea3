PYTHON ?= python3
BIN := .venv/bin
PEERS := benchmarks/peers/.venv
LOWEST := .venv-lowest
NEWEST := .venv-newest
AUDIT := .venv-audit
DOCS := .venv-docs
RELEASE := build/release
PART ?= 1/1
TARGET ?= yaml
SECONDS ?= 60
TRITON ?=
OTHER = .triton/$(TRITON)
TORCH ?= $(shell grep '^torch==' constraints.txt)
JOURNEYS := tests/test_lowest.py tests/test_readme.py tests/test_public_names.py tests/test_config.py tests/cli/test_main.py \
	tests/cli/test_train.py tests/examples tests/cli/test_checkpoint.py tests/data tests/nn tests/train/test_own_model.py \
	tests/train/test_report.py tests/train/test_golden.py tests/checkpoint/test_checkpoint.py tests/embed/test_collection.py

.PHONY: help setup demo test test-all release test-clusters test-lowest test-newest check format gpu-report gpu-limits fuzz audit sbom tutorials docs gpu-suite bench-peers bench-net bench-ablation conformance clean

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## / — /'

setup: .venv/ready  ## install everything into .venv

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/ready  ## raw log to trained model: make demo [DATA=criteo.tsv.gz] [JSON=summary.json]
	$(BIN)/hotbed demo $(DATA) $(if $(JSON),--json $(JSON))

test: .venv/ready  ## run the tests that need minutes
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not full"

test-all: .venv/ready  ## run all tests: whole matrices, long kills, more drawn examples; or a part: make test-all PART=2/6
	rm -f build/failed/*$(subst /,-of-,$(PART)).txt
	$(BIN)/python -m pytest -n auto --dist loadfile --hypothesis-profile full --part $(PART) --failed build/failed/$(subst /,-of-,$(PART)).txt
	$(BIN)/python -m pytest -n auto --dist loadfile -p tests.gpu.race_plugin -k triton tests/ops --part $(PART) \
		--failed build/failed/races-$(subst /,-of-,$(PART)).txt || [ $$? -eq 5 ]  # a part may have none of these tests

test-clusters: .venv/ready  ## install Ray (240 MB), and run the tests of Dask and Ray clusters, kills and all
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray]'
	$(BIN)/python -m pytest tests/data/test_clusters.py tests/data/test_reader_kills.py

test-lowest: $(LOWEST)/ready  ## the main journeys with the oldest versions that are allowed [TORCH=torch==2.9.0]
	XDG_CACHE_HOME="$(CURDIR)/$(LOWEST)/cache" $(LOWEST)/bin/python -m pytest $(JOURNEYS)

$(LOWEST)/ready: pyproject.toml constraints-lowest.txt constraints.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-lowest.txt "$(TORCH)"
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-lowest.txt \
		"$(TORCH)" --editable '.[tensorboard,plot,tune]' $(shell grep -E '^(pytest|pytest-xdist|hypothesis)==' constraints.txt)
	touch $@

test-newest: $(NEWEST)/bin/python  ## the main journeys with the newest versions that pip finds now, but for torch [TORCH=torch==2.14.0]
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
		"$(TORCH)" --editable '.[tensorboard,plot,tune]' pytest pytest-xdist hypothesis
	XDG_CACHE_HOME="$(CURDIR)/$(NEWEST)/cache" $(NEWEST)/bin/python -m pytest $(JOURNEYS)

$(NEWEST)/bin/python:
	$(PYTHON) -m venv $(NEWEST)

check: .venv/ready  ## lint, types, layers, names, prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/test_public_names.py tests/test_names.py
	$(BIN)/python -m tests.prose

format: .venv/ready  ## apply the formatter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

fuzz: .fuzz/ready  ## fuzz a parser, led by coverage: make fuzz [TARGET=plan] [SECONDS=60]; targets are in tests/fuzz
	PYTHONPATH=.fuzz/lib $(BIN)/python -m tests.fuzz $(TARGET) $(SECONDS)

.fuzz/ready: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --target .fuzz/lib atheris==3.0.0
	touch $@

audit: $(AUDIT)/ready  ## known vulnerabilities of the versions in constraints.txt (asks pypi.org)
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

sbom: $(AUDIT)/ready  ## sbom.json: the versions in constraints.txt, as CycloneDX
	$(AUDIT)/bin/cyclonedx-py requirements --no-validate --pyproject pyproject.toml --output-reproducible --output-file sbom.json constraints.txt

$(AUDIT)/ready:
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1 cyclonedx-bom==7.5.0
	touch $@

tutorials: .venv/ready  ## run the notebooks of docs/tutorials, in place: make tutorials [DATA=log.tsv.gz]
	DATA="$(DATA)" $(BIN)/python docs/tutorials/run.py

docs: .venv/ready $(DOCS)/ready  ## the documentation's site, into build/docs/site; dead links and names that are not there fail
	rm -rf build/docs
	$(DOCS)/bin/jupyter-nbconvert --to markdown --log-level WARN --output-dir build/docs/pages/tutorials docs/tutorials/*.ipynb
	$(BIN)/python docs/build.py build/docs
	$(DOCS)/bin/zensical build --strict --config-file build/docs/zensical.toml

$(DOCS)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); \
		print(*p['project']['optional-dependencies']['docs'], sep='\n')" >$(DOCS)/requirements.txt
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --requirement $(DOCS)/requirements.txt
	touch $@

release:  ## build wheel and sdist into dist, install the wheel into an empty environment, and run the quickstart with it
	rm -rf dist $(RELEASE)
	$(PYTHON) -m venv $(RELEASE)/tools
	$(RELEASE)/tools/bin/python -m pip install --quiet --disable-pip-version-check build==1.6.1
	$(RELEASE)/tools/bin/python -m build --outdir dist .
	$(PYTHON) -m venv $(RELEASE)/env
	$(RELEASE)/env/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(RELEASE)/env/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/hotbed-*.whl
	$(RELEASE)/env/bin/python docs/run_quickstart.py $(RELEASE)/quickstart

gpu-report: .venv/ready $(if $(TRITON),$(OTHER)/ready)  ## compile every kernel without a GPU, and write registers, spills and loads into docs/archive/gpu_kernels.md [TRITON=3.6.0 beside] [THEIRS=folder] [ARGS=...]
	$(if $(TRITON),PYTHONPATH=$(OTHER) $(BIN)/python -m tests.gpu.report --json $(OTHER)/report.json >$(OTHER)/report.md)
	$(BIN)/python -m tests.gpu.report --markdown docs/archive/gpu_kernels.md $(if $(TRITON),--beside $(OTHER)/report.json) $(ARGS)
	$(if $(THEIRS),$(BIN)/python -m tests.gpu.report --markdown docs/archive/gpu_kernels.md --targets sm_90 --theirs $(THEIRS))

gpu-limits: .venv/ready $(if $(TRITON),$(OTHER)/ready)  ## the limits of compiled kernels [TRITON=3.6.0: by another Triton]
	$(if $(TRITON),PYTHONPATH=$(OTHER)) $(BIN)/python -m pytest -m "full or not full" tests/gpu/test_compiled.py

.triton/%/ready: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .triton/$* triton==$*
	touch $@

gpu-suite: .venv/ready  ## correctness and bandwidth on a GPU (or tiny, under the interpreter)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash benchmarks/gpu_suite.sh

bench-peers: $(PEERS)/ready  ## against FBGEMM, TorchRec and plain PyTorch on this CPU: make bench-peers [ARGS="--only step"]
	$(PEERS)/bin/python -m benchmarks.peers --json benchmarks/results/peers_cpu.json $(ARGS)

bench-net: $(PEERS)/ready  ## step time and bytes between hosts (network namespaces, as root): make bench-net [ARGS="--ranks 2 4 8"]
	$(PEERS)/bin/python -m benchmarks.net --json benchmarks/results/net.json $(ARGS)

bench-ablation: .venv/ready  ## what each thing is worth whose gain the source reports
	$(BIN)/python -m benchmarks.ablation --json benchmarks/results/ablation.json

$(PEERS)/ready: pyproject.toml constraints.txt benchmarks/peers/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement benchmarks/peers/requirements.txt
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

conformance: .venv/ready  ## compare published figures with measured, simulated and tested ones (docs/published.md)
	$(BIN)/python -m benchmarks.conformance --page docs/published.md

clean:  ## remove what setup and runs made
	rm -rf .venv $(LOWEST) $(NEWEST) $(AUDIT) $(DOCS) $(PEERS) .fuzz .triton build dist sbom.json runs
