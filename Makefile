# make demo: runs the main job; make test: passes the tests. Both set up what they need in .venv, on Debian 12 with Python 3.11.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# Else every process that a test starts, and every worker of pytest, would compile all sources anew.
unexport PYTHONDONTWRITEBYTECODE
# The distribution's own, where there is one: it is built with profiles, and is 1.4 times as fast here as one that pyenv has built without.
PYTHON ?= $(firstword $(wildcard /usr/bin/python3.11) $(shell command -v python3.11 || command -v python3))
BIN := .venv/bin
TORCH ?= torch==2.13.0
# What a later one generates needs a protobuf and a grpcio as late, and engines pin these (LMCache: protobuf < 7, grpcio 1.78.0).
GRPC_TOOLS := 1.78.0
SUDO := $(shell [ "$$(id -u)" = 0 ] || command -v sudo)
# NIXL and UCX each bring a libucp; both in one process crash. The transformers of the examples and their plug-in take each process seconds to load.
# A wheel and an environment with it are made once for all tests of a file.
ALONE := $(addprefix tests/,engines/transformers examples packages transfer/nixl)
# Real engines and the release before have environments of their own, and targets.
ELSEWHERE := tests/engines/live tests/upgrade
# More workers than cores: most tests wait for processes and for one another. Each loads and collects all tests, which takes it 8 s of a core
# and 0.7 GB, and begins with neighbours, so that what a file of tests sets up is set up once or twice.
PYTEST := $(BIN)/python -m pytest -p no:cacheprovider
WORKERS := -n $(shell cores=$$(nproc); echo $$(( cores < 4 ? 4 : cores < 8 ? cores : 8 ))) --dist worksteal
# Tests of no package, or of what processes of their own do, which is not counted.
UNCOUNTED := $(addprefix tests/,deploy docs faults fuzz mutants simulation system)
TOOLS := etcd namespaces strace operators chromium typing

.PHONY: help
help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.PHONY: demo
demo: $(BIN)/.base  ## generated conversations through an embedded cluster, every byte checked
	$(BIN)/kvstore demo

# pytest compiles each test module with its assertions rewritten. All workers begin with the same ones, so from a clean clone each compiles
# all of them: half of the time to collect. Two processes do so before, once for all, each with half of the folders.
build/rewritten: | $(BIN)/.dev typing
	for half in '[a-m]*/' '[n-z]*/'; do \
		$(PYTEST) --collect-only -q tests/$$half $(addprefix --ignore=,$(ALONE) $(ELSEWHERE)) >/dev/null 2>&1 & done; \
		wait && touch $@  # a module that cannot be imported fails the tests themselves

.PHONY: test
test: $(BIN)/.dev $(TOOLS) build/rewritten  ## all tests but the slow ones (make test-all)
	$(PYTEST) -m "not slow" $(ALONE) >build/alone.log 2>&1 & \
		$(PYTEST) -m "not slow" $(WORKERS) tests $(addprefix --ignore=,$(ALONE) $(ELSEWHERE)) && status=0 || status=$$?; \
		wait $$! || status=$$?; cat build/alone.log; exit $$status  # one at a time, beside the others

.PHONY: test-all
test-all: test-slow coverage  ## what make test leaves out, and the gate on branch coverage

# Status 5: there are none of them.
.PHONY: test-slow
test-slow: $(BIN)/.dev $(TOOLS)  ## the slow tests
	$(PYTEST) -m slow $(WORKERS) tests $(addprefix --ignore=,$(ALONE) $(ELSEWHERE)) || [ $$? = 5 ]
	$(PYTEST) -m slow $(ALONE) || [ $$? = 5 ]

# Status 1: a test failed, which is for the other targets to judge: tracing makes the processor slow, and a busy one is late.
.PHONY: coverage
coverage: $(BIN)/.dev $(TOOLS)  ## branch coverage by package: 95 % of each sans-I/O package and 90 % of all, or it fails
	rm -rf build/coverage && mkdir -p build/coverage
	$(PYTEST) $(WORKERS) --cov --cov-report= tests $(addprefix --ignore=,$(UNCOUNTED) $(ALONE) $(ELSEWHERE)) || [ $$? = 1 ]
	$(BIN)/coverage json -q -o build/coverage/report.json
	$(BIN)/python -m tests.coverage_by_package build/coverage/report.json

.PHONY: engines
engines: $(BIN)/.dev  ## environments with real engines and this checkout's wheel, in build/engines
	@dpkg -s libibverbs1 libnuma1 libcurl4 >/dev/null 2>&1 || { echo "installing Mooncake's libraries"; \
		$(SUDO) apt-get update -q >/dev/null && $(SUDO) apt-get install -y -q libibverbs1 libnuma1 libcurl4 >/dev/null; }
	$(BIN)/python -m tests.engines.live.environments

.PHONY: chaos
chaos: $(BIN)/.dev etcd namespaces strace  ## a whole cluster under load and faults for 5 minutes, judged by what clients saw; writes benchmarks/out/chaos.json; needs root
	$(BIN)/python -m tests.faults.chaos --minutes $(or $(MINUTES),5) --seed $(or $(SEED),1) --partitions $(or $(PARTITIONS),1)

.PHONY: test-engines
test-engines: engines  ## real engines (vLLM, SGLang, LMCache and what was written for Mooncake) on a real cluster
	$(PYTEST) tests/engines/live

.PHONY: test-upgrade
test-upgrade: $(BIN)/.dev  ## daemons and clients of this release beside those of the last tagged one, which is taken out of git
	$(BIN)/python -m tests.upgrade

SEEDS ?= 0:10000
.PHONY: chaos-simulated
chaos-simulated: $(BIN)/.dev typing  ## thousands of simulated clusters under faults (SEEDS=FROM:TO); what finds something is cut down and printed
	PYTHONPATH=build/typing:. $(BIN)/python -m tests.simulation --seeds $(SEEDS) --operations 100 --processes $$(nproc)

.PHONY: test-pins
test-pins: $(BIN)/.dev  ## the wheel beside the oldest versions that any engine pins, without the engine
	$(BIN)/python -m tests.engines.live.environments pins
	$(PYTEST) tests/engines/live/test_pins.py -k '[pins]'

.PHONY: test-pythons
test-pythons: $(BIN)/.dev  ## the wheel on each Python from 3.11 to 3.13 that this machine has: client, node and signal suites
	$(BIN)/python -m tests.pythons $(RELEASES)

.PHONY: mutants
mutants: $(BIN)/.dev etcd namespaces typing  ## seeded bugs, each put into a copy of the tree: which test catches it
	$(BIN)/python -m tests.mutants

.PHONY: fuzz
fuzz: $(BIN)/.dev typing  ## coverage-guided fuzzing of what is read from peers, disks and files; 20 s for each of 15 kinds
	@$(BIN)/python -c "import atheris" 2>/dev/null || $(BIN)/pip install -q "atheris>=3"
	$(BIN)/python -m tests.fuzz

.PHONY: lint
lint: $(BIN)/.dev typing  ## ruff, mypy --strict, import-linter, no marks of a conflict
	! git grep -nE '^(<{7}|>{7}) '
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(addprefix build/typing/kvstore/,protocol security rpc kvcache telemetry tiers transfer scheduler console testing lab master store client router handover engines cli benchmarks) examples tests
	cd build/typing && PYTHONPATH=. ../../$(BIN)/lint-imports --config ../../pyproject.toml

.PHONY: bench
bench: $(BIN)/.dev etcd  ## the store against memcpy and Redis, in one run; writes benchmarks/out/store.json
	@command -v redis-server >/dev/null || $(SUDO) apt-get install -y -q redis-server >/dev/null || \
		{ echo "make bench compares with Redis: install redis-server"; exit 1; }
	$(BIN)/python -m benchmarks.store

.PHONY: bench-transfer
bench-transfer: $(BIN)/.dev namespaces  ## the transfer engine against memcpy, iperf3, Mooncake, UCX and NIXL, and reads of other hosts; writes benchmarks/out/transfer.json
	@command -v iperf3 >/dev/null && dpkg -s libibverbs1 libnuma1 libcurl4 >/dev/null 2>&1 || { echo "installing iperf3 and Mooncake's libraries"; \
		$(SUDO) apt-get update -q >/dev/null && $(SUDO) apt-get install -y -q iperf3 libibverbs1 libnuma1 libcurl4 >/dev/null; } || \
		echo "could not install iperf3, libibverbs1, libnuma1 and libcurl4: the table lacks what needs them"
	$(BIN)/python -m benchmarks.transfer

.PHONY: bench-remote
bench-remote: $(BIN)/.dev namespaces  ## puts and gets of other hosts against a frame, the link, Mooncake's store and Redis, PARTS="small shaped unshaped"; writes benchmarks/out/remote.json; needs root
	$(BIN)/python -m benchmarks.remote_puts $(PARTS)

.PHONY: bench-rails
bench-rails: $(BIN)/.dev namespaces  ## the transfer engine over three shaped rails that are cut and restored; writes benchmarks/out/rails.json; needs root
	@command -v nft >/dev/null || { echo "make bench-rails needs ip, tc and nft: install iproute2 and nftables"; exit 1; }
	$(BIN)/python -m benchmarks.rails

.PHONY: bench-policy
bench-policy: $(BIN)/.dev  ## eviction policies on the conversation trace, their cost, and the live store's replay; writes benchmarks/out/policy.json
	$(BIN)/python -m benchmarks.policy

.PHONY: bench-pool
bench-pool: $(BIN)/.dev  ## four nodes as one pool on the conversation trace, live; writes benchmarks/out/pool.json
	$(BIN)/python -m benchmarks.pool

.PHONY: bench-scheduler
bench-scheduler: $(BIN)/.dev  ## dispatchers and early rejection in the cluster simulator; writes benchmarks/out/scheduler.json
	$(BIN)/python -m benchmarks.scheduler

.PHONY: bench-kvcache
bench-kvcache: $(BIN)/.dev namespaces  ## codecs against memcpy, re-mapping plans, hand-over layer by layer over shaped rails; writes benchmarks/out/kvcache.json
	$(BIN)/python -m benchmarks.kvcache

.PHONY: bench-master
bench-master: $(BIN)/.dev  ## masters by themselves: memory a block, pauses; writes benchmarks/out/master.json
	$(BIN)/python -m benchmarks.masters

.PHONY: bench-security
bench-security: $(BIN)/.dev  ## what TLS, tokens and checksums cost reads over TCP; writes benchmarks/out/security.json
	$(BIN)/python -m benchmarks.security

.PHONY: bench-local-puts
bench-local-puts: $(BIN)/.dev  ## single puts of 64 KiB to 16 MiB on this host against Mooncake, also beside a thread that computes; writes benchmarks/out/local_puts.json
	$(BIN)/python -m benchmarks.local_puts

.PHONY: bench-small-puts
bench-small-puts: $(BIN)/.dev  ## CPU time that client, node and master take for a put of 4 KiB, in batches, alone, by many processes beside Redis and by many threads (SECONDS=30: for so long); writes benchmarks/out/small_puts.json
	$(BIN)/python -m benchmarks.small_puts $(if $(SECONDS),--seconds $(SECONDS))

.PHONY: bench-start
bench-start: $(BIN)/.dev  ## the client's import, a node with 8 GiB until it is ready, first writes of new clients; writes benchmarks/out/start.json
	$(BIN)/python -m benchmarks.start

.PHONY: bench-scale
bench-scale: $(BIN)/.dev  ## what a cluster of a thousand nodes computes and sends, by role, simulated; writes benchmarks/out/scale.json
	$(BIN)/python -m tests.simulation.scale

.PHONY: bench-nvme
bench-nvme: $(BIN)/.dev  ## reads from NVMe, puts above it and what it writes against fio on the same disk; writes benchmarks/out/nvme.json
	@command -v fio >/dev/null || $(SUDO) apt-get install -y -q fio >/dev/null || { echo "make bench-nvme compares with fio: install fio"; exit 1; }
	$(BIN)/python -m benchmarks.nvme $(FOLDER)

.PHONY: bench-prefetch
bench-prefetch: $(BIN)/.dev  ## loads of a prompt's blocks from NVMe and another node, with and without a prefetch before; writes benchmarks/out/prefetch.json
	$(BIN)/python -m benchmarks.prefetch $(FOLDER)

.PHONY: bench-telemetry
bench-telemetry: $(BIN)/.dev  ## what metrics and traces cost puts and gets of 4 KiB; writes benchmarks/out/telemetry.json
	$(BIN)/python -m benchmarks.telemetry

.PHONY: bench-metrics-cost
bench-metrics-cost: $(BIN)/.dev  ## what metrics, scrapes and the console's looks cost puts in processor time; writes benchmarks/out/metrics_cost.json
	$(BIN)/python -m benchmarks.metrics_cost

.PHONY: bench-tensors
bench-tensors: $(BIN)/.dev  ## an engine's layers to the store and back against memcpy; writes benchmarks/out/tensors.json
	$(BIN)/python -m benchmarks.tensors

# The interpreter that is there, with its own torch; where it has none, .venv.
GPU_PYTHON = $(if $(filter command environment,$(word 1,$(origin PYTHON))),$(PYTHON),$(shell python3 -c "import sys, importlib.util as util; sys.exit(not util.find_spec('torch'))" 2>/dev/null && command -v python3 || echo $(BIN)/python))

.PHONY: gpu
gpu:  ## what copies to and from a GPU, tested and measured on this machine's torch (PYTHON=python3, WHEELS=folder without an index, PARTS="copies hbm"); writes benchmarks/out/gpu.json
	@[ "$(GPU_PYTHON)" != $(BIN)/python ] || $(MAKE) --no-print-directory $(BIN)/.dev
	$(GPU_PYTHON) -m benchmarks.gpu $(if $(WHEELS),--wheels "$(WHEELS)") $(PARTS)

# aetcd has no wheel on the index, and is pure Python.
WHEELS_PYTHON ?= 3.12
WHEELS_PLATFORMS := $(foreach glibc,2_34 2_28 2_27 2_17 2_5,--platform manylinux_$(glibc)_x86_64) --platform manylinux2014_x86_64 --platform manylinux1_x86_64
.PHONY: gpu-wheels
gpu-wheels: $(BIN)/python  ## wheels that make gpu needs on a machine without an index, for Python 3.12 or WHEELS_PYTHON, into build/gpu-wheels or WHEELS
	$(BIN)/pip wheel -q --disable-pip-version-check --no-deps -w $(or $(WHEELS),build/gpu-wheels) "aetcd>=1.0,<2"
	$(BIN)/pip download -q --disable-pip-version-check --only-binary=:all: --python-version $(WHEELS_PYTHON) --implementation cp $(WHEELS_PLATFORMS) \
		--find-links $(or $(WHEELS),build/gpu-wheels) -d $(or $(WHEELS),build/gpu-wheels) $$($(BIN)/python -m benchmarks.gpu.environment)
	@du -sh $(or $(WHEELS),build/gpu-wheels)

.PHONY: bench-fingerprint
bench-fingerprint: $(BIN)/.dev  ## how long an engine's start waits for the fingerprint of 100 GB of weights, cold if root; writes benchmarks/out/fingerprint.json
	$(BIN)/python -m benchmarks.fingerprint

.PHONY: bench-engines
bench-engines: engines  ## real engines with the store against the same without it, and against Mooncake; writes benchmarks/out/engines.json
	$(BIN)/python -m benchmarks.engines

.PHONY: bench-first-hit
bench-first-hit: $(BIN)/.dev  ## time from a fresh clone to the first prompt that vLLM loads from the store, downloads included; writes benchmarks/out/first_hit.json
	$(BIN)/python -m benchmarks.first_hit

.PHONY: docs
docs: $(BIN)/.dev build/grpc-tools-$(GRPC_TOOLS)/made typing  ## generated pages of docs/ and the gRPC code, from their sources
	$(BIN)/python docs/make_settings.py > docs/settings.md
	$(BIN)/python docs/make_metrics.py > docs/metrics.md
	$(BIN)/python docs/make_alerts.py > docs/alerts.md
	$(BIN)/python docs/make_promises.py > docs/promise-tests.md
	$(BIN)/python deploy/make_dashboards.py
	build/grpc-tools-$(GRPC_TOOLS)/bin/python -m grpc_tools.protoc -I build/typing --python_out=build/typing --pyi_out=build/typing \
		--grpc_python_out=build/typing build/typing/kvstore/protocol/control.proto

.PHONY: screenshots
screenshots: $(BIN)/.dev chromium typing  ## docs/console: the console and kvstore top of a simulated cluster
	PYTHONPATH=build/typing $(BIN)/python docs/make_screenshots.py

build/grpc-tools-$(GRPC_TOOLS)/made: | $(BIN)/python
	@echo "installing grpcio-tools $(GRPC_TOOLS) into $(@D)"
	@$(BIN)/python -m venv $(@D) && $(@D)/bin/python -m pip install -q --disable-pip-version-check grpcio-tools==$(GRPC_TOOLS) && touch $@

.PHONY: site
site: $(BIN)/.dev  ## the documentation as pages, in build/site
	$(BIN)/python docs/make_site.py && echo "open build/site/index.html"

.PHONY: typing
typing:
	@mkdir -p build/typing && ln -sfn ../.. build/typing/kvstore

.PHONY: etcd
etcd: | $(BIN)/python
	@command -v etcd >/dev/null && command -v etcdctl >/dev/null && command -v openssl >/dev/null || { \
		echo "installing etcd-server, etcd-client and openssl"; \
		$(SUDO) apt-get update -q >/dev/null && $(SUDO) apt-get install -y -q etcd-server etcd-client openssl >/dev/null; } || \
		{ echo "make test needs etcd, etcdctl and openssl: install Debian's etcd-server, etcd-client and openssl, or put an etcd >= 3.4 on the PATH"; exit 1; }

# After the others, for one apt-get at a time.
.PHONY: chromium
chromium: | namespaces operators
	@command -v chromium >/dev/null || { echo "installing chromium"; \
		$(SUDO) apt-get update -q >/dev/null && $(SUDO) apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core >/dev/null; } || \
		{ echo "make test needs a browser for the console's page: install Debian's chromium"; exit 1; }

# After etcd, for one apt-get at a time.
.PHONY: namespaces
namespaces: | etcd
	@command -v ip >/dev/null && command -v tc >/dev/null && command -v nft >/dev/null || { echo "installing iproute2 and nftables"; \
		$(SUDO) apt-get update -q >/dev/null && $(SUDO) apt-get install -y -q iproute2 nftables >/dev/null; } || \
		echo "could not install iproute2 and nftables: what needs hosts of its own is left out"

.PHONY: operators
operators: | strace
	@command -v systemd-analyze >/dev/null && command -v systemd-sysusers >/dev/null && command -v prometheus >/dev/null || { \
		echo "installing systemd's tools and prometheus"; \
		$(SUDO) apt-get update -q >/dev/null && $(SUDO) apt-get install -y -q systemd prometheus >/dev/null; } || \
		{ echo "make test needs systemd-analyze and prometheus: install Debian's systemd and prometheus"; exit 1; }

.PHONY: strace
strace: | namespaces
	@command -v strace >/dev/null || { echo "installing strace"; \
		$(SUDO) apt-get update -q >/dev/null && $(SUDO) apt-get install -y -q strace >/dev/null; } || \
		echo "could not install strace: devices that fail are left out"

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "needs Python 3.11 or newer: apt-get install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "needs Python 3.11 or newer, $(PYTHON) is older"; exit 1; }
	@$(PYTHON) -m venv .venv >/dev/null 2>&1 || { rm -rf .venv; echo "installing python3-venv"; $(SUDO) apt-get update -q >/dev/null && \
		$(SUDO) apt-get install -y -q python3-venv >/dev/null && $(PYTHON) -m venv .venv; } || \
		{ rm -rf .venv; echo "needs a Python with venv and pip: apt-get install python3-venv"; exit 1; }

$(BIN)/.base: pyproject.toml | $(BIN)/python
	@echo "installing kvstore into .venv"
	@$(BIN)/pip install -q --disable-pip-version-check -e . || { echo "pip could not install the dependencies of pyproject.toml"; exit 1; }
	@touch $@

# torch goes first and pinned: a package that pulls it unpinned would download gigabytes of CUDA. UCX and NIXL run on CPU memory too. Nothing is
# compiled ahead: less than half of it is ever imported, and tests are collected by one process at a time. What builds the project is one of
# its test tools: pip need not install it once more into an environment of its own.
$(BIN)/.dev: pyproject.toml | $(BIN)/python
	@echo "installing kvstore with its test tools into .venv"
	@$(BIN)/pip install -q --no-compile --disable-pip-version-check "$(TORCH)" "setuptools>=77" && \
		$(BIN)/pip install -q --no-compile --no-build-isolation --disable-pip-version-check -e '.[dev,ucx,nixl]' || \
		{ echo "pip could not install $(TORCH) or the dependencies of pyproject.toml"; exit 1; }
	@touch $@ $(BIN)/.base

.PHONY: wheel
wheel: $(BIN)/.dev  ## wheel and sdist in build/dist, checked by twine
	rm -rf build/dist
	$(BIN)/python -m build --no-isolation --outdir build/dist .
	$(BIN)/twine check --strict build/dist/*

.PHONY: image
image:  ## the OCI image kvstore, by docker, podman or buildah, whichever works here; EXTRAS=sidecar,ucx for more in it
	@for one in docker podman buildah; do $$one info >/dev/null 2>&1 && exec $$one build -f deploy/image/Dockerfile \
		$$([ $$one = docker ] || echo --ignorefile deploy/image/Dockerfile.dockerignore) --build-arg EXTRAS=$(or $(EXTRAS),sidecar) -t kvstore .; done; \
		echo "make image needs docker, podman or buildah, and none of them works here"; exit 1

.PHONY: clean
clean:  ## remove what the targets made
	rm -rf .venv build benchmarks/out .coverage *.egg-info
