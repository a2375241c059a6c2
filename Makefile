# Two commands: `make run` shows flash attention beside standard attention, `make test` runs every check that can run here.
VENV ?= .venv
BUILD := build/release
PYTHON := $(VENV)/bin/python
ANY_PYTHON := $(or $(wildcard $(PYTHON)),python3)
COMMAND := $(BUILD)/flash-attention
export VENV
export VIRTUAL_ENV := $(abspath $(VENV))
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.DEFAULT_GOAL := help
.PHONY: help run test torch-versions bench format lint sanitize docs fuzz install packages wheels kernels-wheel wheels-test clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

run: ## flash against standard attention on the best device here: a table, and plots in build/run/
	@tools/prepare.sh run -- flash-attention
	@$(ANY_PYTHON) tools/plot_run.py --command $(COMMAND) --output build/run

test: ## set up, build and run every test; ends with passed, failed, skipped; ALL=1: the long tail, too
	@tools/prepare.sh run test --
	@$(PYTHON) tools/run_tests.py $(if $(ALL),--all)

torch-versions: ## the tests of the Python package with the oldest and the newest torch that is supported (several GB each)
	@tools/prepare.sh run test -- flash_attention_internal flash-attention
	@$(PYTHON) tools/run_tests.py --only torch

bench: ## measure this machine against PyTorch and more, in a few minutes; JSON and report in build/bench/
	@tools/setup.sh build run test
	@tools/install_python.sh
	@$(PYTHON) bench/benchmark_speed.py --preset quick --force --output build/bench/speed.json
	@$(PYTHON) bench/visualize_results.py build/bench/speed.json --output build/bench/report.html

format: ## rewrite C++ with clang-format and Python with ruff
	@tools/setup.sh lint
	@$(PYTHON) tools/lint.py --fix

lint: ## check format, clang-tidy, ruff and the table of includes; ALL=1: its analyzer on every file (minutes)
	@tools/setup.sh build lint
	@$(PYTHON) tools/lint.py $(if $(ALL),--all)

sanitize: ## the part of `make test` that runs under the address, undefined-behaviour and thread sanitizers
	@tools/setup.sh build run test
	@$(PYTHON) tools/run_tests.py --only asan --only tsan

docs: ## the documentation as a site, links checked, with the reference of Python, C++ and C; in build/site/html/
	@tools/setup.sh build run test docs
	@tools/install_python.sh
	@$(PYTHON) tools/site_source.py

fuzz: ## covering arrays and libFuzzer (needs clang++), a minute each; FUZZ_SECONDS=600 for longer
	@tools/setup.sh build fuzz
	@tools/fuzz.sh

install: ## install library, headers and command below PREFIX (default /usr/local)
	@tools/setup.sh build
	@tools/build.sh release
	@cmake --install $(BUILD) $(if $(PREFIX),--prefix $(PREFIX))

packages: ## a tarball and a Debian package of library, headers and command, in dist/
	@tools/setup.sh build packages
	@tools/build.sh release flash_attention flash-attention flash-attention-pages
	@cpack --config $(BUILD)/CPackConfig.cmake -B dist >$(BUILD)/cpack.log || (cat $(BUILD)/cpack.log; exit 1)
	@rm -rf dist/_CPack_Packages && ls -1 dist/*.deb dist/*-Linux-*.tar.gz

wheels: ## the sdist and wheels for every Python from 3.10 that is here, in dist/
	@tools/setup.sh build wheels
	@$(ANY_PYTHON) tools/wheels.py

kernels-wheel: ## a wheel of GPU kernels compiled ahead of time, in dist/; needs NVRTC and no GPU (15 minutes on two cores)
	@tools/setup.sh build run test
	@tools/build.sh release flash-attention
	@$(PYTHON) tools/kernels_wheel.py --command $(COMMAND)

wheels-test: ## install the wheels of dist/ in empty environments without a compiler, and time them
	@tools/setup.sh build run test
	@FLASH_ATTENTION_TEST_ALL=1 FLASH_ATTENTION_WHEELS=$(abspath dist) $(PYTHON) -m pytest -q -p no:cacheprovider tests/wheels

clean: ## remove what was built (the virtual environment stays)
	@rm -rf build
