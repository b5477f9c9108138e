# Everything runs in .venv; the first target that needs it creates it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PORT ?= 8080
PROPERTIES ?= serving.properties
OUT ?= build/compare
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
GPU_PYTHON ?= $(BIN)/python
TRITON_FLOOR := 3.6.0
COMPARE := OMP_NUM_THREADS=1 $(BIN)/python -m loadtest compare --properties examples/compare/cpu.properties --requests 60
EVERY_VARIANT := LONGSHORE_ALL_VARIANTS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto

.PHONY: help setup serve compare harm soak test conformance check audit asan image-check variants kernels gpu format docs clean

help:  ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 13

setup: .venv/installed  ## Create .venv with the versions pinned in constraints.txt

.venv/installed: pyproject.toml constraints.txt
	@echo "Installing everything for development into .venv: 2.5 GB, more if torch is a CUDA build; some minutes"
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[dev]'
	touch $@ .venv/serving

.venv/serving: pyproject.toml constraints.txt
	@echo "Installing what serving needs into .venv: 1.2 GB, more if torch is a CUDA build; some minutes"
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable .
	touch $@

serve: .venv/serving  ## Serve the demo model (PORT=8080 PROPERTIES=serving.properties ARGS='--strategies all')
	exec $(BIN)/python -m container serve --port $(PORT) --properties $(PROPERTIES) $(ARGS)

compare: setup  ## Load-test every strategy with the demo model on this machine; report in OUT=build/compare
	$(COMPARE) --workload aws --users 24 --length-scale 0.5 --out $(OUT)/aws
	$(COMPARE) --workload chat --requests 100 --length-scale 0.12 --time-scale 16 --out $(OUT)/chat
	$(COMPARE) --workload shared-prefix --users 24 --length-scale 0.4 --out $(OUT)/shared-prefix
	$(BIN)/python -m loadtest report $(OUT)/aws $(OUT)/chat $(OUT)/shared-prefix --pictures --out $(OUT)

harm: setup  ## Send hostile requests to the demo model and measure what they cost others (ARGS='--rows grammar')
	OMP_NUM_THREADS=1 $(BIN)/python -m loadtest harm --json build/harm.json $(ARGS)

soak: setup  ## Ten minutes of good, bad and leaving clients and of kills (ARGS='--seconds 60')
	OMP_NUM_THREADS=1 $(BIN)/python -m loadtest soak --seconds 600 --json build/soak.json $(ARGS)

# One process more than cores: tests with a server wait for it half of the time.
test: setup  ## Run all tests (ARGS='tests/core -k stop' for some)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $$(($$(nproc) + 1)) --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

conformance: setup .conformance/installed  ## Call the demo model with other people's clients, and write docs/conformance.md
	OMP_NUM_THREADS=1 .conformance/bin/python -m pytest -c conformance/pytest.ini --rootdir conformance conformance $(ARGS)

.conformance/installed: conformance/requirements.txt
	$(PYTHON) -m venv .conformance
	.conformance/bin/python -m pip install --quiet -r $<
	touch $@

check: setup  ## Check lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	test ! -x $(BIN)/hadolint || $(BIN)/hadolint Dockerfile

# --no-verify: what looks like a key is not tried at its provider. The rest: placeholders of examples and tests.
audit: setup  ## Search the tracked files for passwords, keys and tokens
	git ls-files -z | xargs -0 $(BIN)/detect-secrets-hook --no-verify --exclude-secrets '^(none|keys)$$'
	@echo "no secrets in $$(git ls-files | wc -l) tracked files"

asan: setup  ## Run the tests of the CPU's C++ kernels under AddressSanitizer (needs g++)
	LONGSHORE_CACHE=build/asan CXX=tests/kernels/cpu/asan-g++ ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	$(BIN)/python -m pytest tests/kernels/cpu $(ARGS)

image-check: setup  ## Build the image without Docker (as root, with buildah and debootstrap) and test it
	image/check

variants: setup  ## Compile every kernel variant for every GPU and check the code (ARGS='-k prefill-256')
	$(EVERY_VARIANT) tests/kernels/test_*compile.py $(ARGS)

kernels: variants .triton-$(TRITON_FLOOR)/installed  ## Run variants, then variants and all kernel tests with the oldest supported Triton
	PYTHONPATH=.triton-$(TRITON_FLOOR) $(EVERY_VARIANT) tests/kernels $(ARGS)

.triton-$(TRITON_FLOOR)/installed: .venv/installed  # oldest supported Triton, beside the pinned one
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) triton==$(TRITON_FLOOR)
	touch $@

gpu: $(if $(filter $(BIN)/%,$(GPU_PYTHON)),setup)  ## Check and time kernels and engine on this GPU (ARGS='--sections decode --out DIR')
	$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

format: setup  ## Format the code and apply ruff's fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup  ## Write docs/configuration.md, limits.md and contract.md from the tables of the code
	$(BIN)/python -c "from container.configuration.report import markdown_lines; print(*markdown_lines(), sep='\n')" > docs/configuration.md
	$(BIN)/python -c "from core.limits import markdown_lines; print(*markdown_lines(), sep='\n')" > docs/limits.md
	$(BIN)/python -c "from container.front_end.contract import markdown_lines; print(*markdown_lines(), sep='\n')" > docs/contract.md

clean:  ## Remove .venv and caches
	rm -rf .venv .conformance .triton-$(TRITON_FLOOR) .pytest_cache .ruff_cache .hypothesis *.egg-info
