# The commands of this project. Each creates the environment it needs.
# A CUDA machine may bring its own torch: make setup TORCH="torch==2.11.0" PIP_FLAGS="--index-url ..."
PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(PINNED)
PIP_FLAGS ?=
BIN := $(VENV)/bin
# Another torch brings a Triton of its own.
PINNED := torch==2.13.0
CONSTRAINTS := $(if $(filter $(PINNED),$(TORCH)),constraints.txt,$(VENV)/constraints.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS) $(PIP_FLAGS)
TESTS := $(BIN)/python -m pytest
# In the order of tests/conftest.py. Each process starts a Ray cluster of its own.
BOTH_CORES := --numprocesses 2 --dist loadfile --no-loadscope-reorder
# One thread per process: tests and demo start several processes on few cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: setup setup-run demo check format test test-long test-ray test-ray-newest test-gpu test-vllm fuzz bench bench-serve \
	generate docs wheel image sbom licences clean

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/constraints.txt: constraints.txt | $(VENV)/bin/python
	grep -v -e '^torch==' -e '^triton==' $< > $@

# Torch first: whatever else asks for torch then finds it installed.
$(VENV)/.run: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(PIP) $(TORCH) numpy setuptools ninja
	$(PIP) --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) --editable ".[dev]"
	touch $@

setup-run: $(VENV)/.run        ## what the product needs
setup: $(VENV)/.dev            ## and what its developers need

demo: setup-run                ## adapt a model, measure, serve, ask: ten to twenty minutes on two cores
	$(BIN)/mars-ray demo jobs/demo.toml $(ARGS)

check: setup                   ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: check                    ## what runs on a CPU, but for test-long
	$(TESTS) $(BOTH_CORES) -m "not gpu and not long and not ray" $(ARGS)
	$(TESTS) $(BOTH_CORES) -m "ray and not gpu and not long" $(ARGS)

test-long: setup               ## clusters that lose nodes, jobs, sweeps, first steps, Prometheus: two hours
	$(TESTS) -m long $(ARGS)

test-ray: setup                ## only what starts a Ray cluster
	$(TESTS) -m ray $(ARGS)

# The newest that the registry has, or the one that is named: make test-ray-newest RAY="ray==2.59.0"
RAY ?= ray
RAY_VENV ?= .venv-ray
RAY_TESTS ?= $(addprefix tests/,serve/test_complaints.py serve/test_faults.py serve/test_autoscaler.py serve/test_deployed.py \
	train/test_train_on_ray.py tune/test_tune_on_ray.py test_job_submission.py)
test-ray-newest: setup         ## the main tests on a cluster by another Ray, in an environment that this makes
	PYTHON=$(PYTHON) tools/ray_env.sh $(BIN)/python $(RAY_VENV) "$(RAY)"
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH=$(CURDIR) $(RAY_VENV)/bin/python -m pytest -m ray $(RAY_TESTS) $(ARGS)

test-gpu: setup                ## only what needs a CUDA device
	$(TESTS) -m gpu $(ARGS)

# vLLM pins other versions than we do, so it has an environment of its own; our package is found by
# its path, and the plug-in by the entry points of mars_ray.egg-info.
VLLM_VENV ?= .venv-vllm
$(VLLM_VENV)/bin/python:
	PYTHON=$(PYTHON) tools/vllm_cpu_env.sh $(VLLM_VENV)

test-vllm: $(VLLM_VENV)/bin/python  ## the plug-in for vLLM, in an environment that this makes
	$(VLLM_VENV)/bin/python -c "import setuptools; setuptools.setup()" --quiet egg_info
	PYTHONPATH=$(CURDIR) $(VLLM_VENV)/bin/python -m pytest -m vllm tests/in_vllm $(ARGS)
	PYTHONPATH=$(CURDIR) $(VLLM_VENV)/bin/python -m pytest -m vllm $(addprefix tests/serve/test_,engine_client.py vllm_service.py fuzz.py swap.py drain.py) $(ARGS)

fuzz: setup                    ## 6,000 requests made up from the served schema: some minutes
	FUZZ_REQUESTS=6000 $(TESTS) -s tests/serve/test_fuzz.py $(ARGS)

bench: setup                   ## writes benchmarks/results/, then the tables of the README
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/train_step.py --output benchmarks/results/train_step.json
	$(BIN)/python benchmarks/render.py

# AIPERF: the program that benchmarks/install_load_tool.sh installs; VLLM: a Python that has vLLM.
bench-serve: setup             ## the live service under load, a quarter of an hour on idle cores
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/serve_load.py $(CHECKPOINT) --aiperf $(AIPERF) --vllm $(VLLM)
	$(BIN)/python benchmarks/render.py

generate: setup                ## what scripts write: references, dashboard, the chart's jobs and schema
	$(BIN)/python tools/reference_pages.py
	$(BIN)/python tools/dashboard.py
	$(BIN)/python tools/job_manifests.py
	$(BIN)/python tools/chart_schema.py

docs: setup                    ## the site, in build/site
	PYTHONPATH=tools $(BIN)/mkdocs build --strict

wheel: setup                   ## in dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# BASE_DIGEST: sha256:... of python:3.11-slim-bookworm, as `docker buildx imagetools inspect` tells it.
VERSION = $(shell $(BIN)/python -c "import mars_ray; print(mars_ray.__version__)")
image: setup-run               ## mars-ray-cpu, mars-ray-cuda and mars-ray-vllm
	docker build --file deploy/Dockerfile --target cpu --build-arg BASE_DIGEST=$(BASE_DIGEST) \
		--tag mars-ray-cpu:$(VERSION) .
	docker build --file deploy/Dockerfile --target cuda --build-arg BASE_DIGEST=$(BASE_DIGEST) \
		--tag mars-ray-cuda:$(VERSION) .
	docker build --file deploy/Dockerfile --target vllm --build-arg BASE_DIGEST=$(BASE_DIGEST) \
		--tag mars-ray-vllm:$(VERSION) .

# The tool has dependencies that ours exclude, so it gets an environment of its own.
sbom: setup-run                ## dist/sbom.json: what an installation brings along, by CycloneDX
	$(PYTHON) -m venv $(VENV)-sbom
	$(VENV)-sbom/bin/python -m pip --disable-pip-version-check install --quiet "cyclonedx-bom>=7"
	mkdir -p dist
	$(VENV)-sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file dist/sbom.json $(BIN)/python

licences: setup                ## of the dependencies, by the list of tools/licences.py
	$(BIN)/python tools/licences.py

clean:
	rm -rf $(VENV) $(VENV)-sbom build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
