# Everything runs in .venv; the first target that needs it creates it.
# Tests start hundreds of processes. If none wrote bytecode, each would compile every module anew.
export PYTHONDONTWRITEBYTECODE =
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PORT ?= 8080
PROPERTIES ?= serving.properties
OUT ?= build/compare
SECONDS ?= 600
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
GPU_PYTHON ?= $(BIN)/python
TRITON_FLOOR := 3.6.0
PIP_AUDIT := 2.10.1
COMPARED ?= examples/compare/cpu.properties
COMPARE := OMP_NUM_THREADS=1 $(BIN)/python -m loadtest compare --properties $(COMPARED) --seconds 2 --requests 2000
FORECAST := OMP_NUM_THREADS=1 $(BIN)/python -m loadtest compare --properties $(COMPARED) --record --no-tuning --rounds 1
# One process more than cores: tests with a server wait for it half of the time.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $$(($$(nproc) + 1)) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
EVERY_VARIANT := LONGSHORE_ALL_VARIANTS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --matrix

.PHONY: help setup serve compare forecasts compare-windows harm soak recorded test matrix conformance page-test pictures fleet-test check audit audit-versions asan image-check variants kernels kernels-floor \
        gpu format docs clean

help:  ## Show these targets (ALL=1: all targets)
	@sed -n 's/^\([a-z-]*\):.*#[#$(if $(ALL),:)] /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: .venv/installed  #: Create .venv with the versions pinned in constraints.txt

.venv/installed: pyproject.toml constraints.txt
	@echo "Installing everything for development into .venv: 2.5 GB, more if torch is a CUDA build; some minutes"
	@$(PYTHON) -m venv .venv
	@$(INSTALL) --editable '.[dev]'
	@touch $@ .venv/serving

.venv/serving: pyproject.toml constraints.txt
	@echo "Installing what serving needs into .venv: 1.2 GB, more if torch is a CUDA build; some minutes"
	@$(PYTHON) -m venv .venv
	@$(INSTALL) --editable .
	@touch $@

serve: .venv/serving  ## Serve the demo model (PORT=8080 PROPERTIES=serving.properties ARGS='--strategies all')
	exec $(BIN)/python -m container serve --port $(PORT) --properties $(PROPERTIES) $(ARGS)

compare: setup  ## Load-test every strategy with the demo model on this machine; report in OUT=build/compare
	$(COMPARE) --workload aws --users 24 --length-scale 0.5 --out $(OUT)/aws
	$(COMPARE) --workload chat --length-scale 0.12 --time-scale 16 --out $(OUT)/chat
	$(COMPARE) --workload shared-prefix --users 24 --length-scale 0.4 --out $(OUT)/shared-prefix
	$(BIN)/python -m loadtest report $(OUT)/aws $(OUT)/chat $(OUT)/shared-prefix --pictures --out $(OUT)

# The requests are as many for each strategy, so the slow ones take longer.
forecasts: setup  #: Forecast from a recording of `paged` what `compare` then measures of the other strategies
	$(FORECAST) --requests 96 --workload aws --users 24 --length-scale 0.5 --out $(OUT)-forecasts/aws
	$(FORECAST) --requests 192 --workload chat --length-scale 0.12 --time-scale 8 --out $(OUT)-forecasts/chat
	$(FORECAST) --requests 96 --workload shared-prefix --users 24 --length-scale 0.4 --out $(OUT)-forecasts/shared-prefix
	$(BIN)/python -m benchmarks.advise.compared $(addprefix $(OUT)-forecasts/,aws chat shared-prefix) $(ARGS)

compare-windows: setup  #: The same with the demo model made to read 64 tokens in three of its four layers
	$(BIN)/python -m models.windows build/windows
	$(MAKE) compare COMPARED=examples/compare/windows.properties OUT=$(OUT)-windows

harm: setup  #: Send hostile requests to the demo model and measure what they cost others (ARGS='--rows grammar')
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.harm harm --json build/harm.json $(ARGS)

soak: setup  #: Good, bad and leaving clients and kills, a fuzz of the strategies, answers bit by bit (SECONDS=600 of each)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.harm soak --seconds $(SECONDS) --json build/soak.json $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.strategies.fuzz --seconds $(SECONDS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.engine.same_bits --seconds $(SECONDS)
	ANSWERS=200 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/e2e/test_verify.py

recorded: setup  #: Good traffic for each strategy; then replay, receipts and causes of its recording (SECONDS=600)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.harm recorded --seconds $(SECONDS) $(ARGS)

test: setup  ## Run all tests, a sample of wide matrices (ARGS='tests/core -k stop' for some)
	$(PYTEST) $(ARGS)

matrix: setup  #: Run all cases of the matrices that test samples: kernels, families, strategies, routes, ranks
	$(PYTEST) --matrix -m matrix --ignore tests/kernels/compiled $(ARGS)

conformance: setup .conformance/installed .suites/installed .vllm/installed  #: Call the demo model with other people's clients, and write docs/reference/conformance.md
	OMP_NUM_THREADS=1 .conformance/bin/python -m pytest -c tests/conformance/pytest.ini --rootdir tests/conformance tests/conformance $(ARGS)

.conformance/installed: tests/conformance/requirements.txt tests/conformance/node/package-lock.json
	$(PYTHON) -m venv .conformance
	.conformance/bin/python -m pip install --quiet -r $<
	.conformance/bin/npm ci --prefix tests/conformance/node --ignore-scripts --no-audit --no-fund --loglevel=error
	touch $@

# The suites use torch and transformers of .venv, which pip finds by the .pth file and does not install again.
.suites/installed: tests/conformance/suites.txt .venv/installed
	$(PYTHON) -m venv .suites
	$(BIN)/python -c "import site; print(*site.getsitepackages())" > "$$(.suites/bin/python -c 'import site; print(*site.getsitepackages())')/venv.pth"
	.suites/bin/python -m pip install --quiet -r $<
	touch $@

# Some 3 GB. It is the vLLM that benchmarks.cpu compares with.
.vllm/installed: | .venv/installed
	$(BIN)/python -c "from pathlib import Path; from benchmarks.cpu.peer_python import make_peer; make_peer('vllm', Path('$(@D)'))"

page-test: setup .browser/installed  #: Test the live page in a headless Chromium (CHROMIUM=/path/to/chromium)
	OMP_NUM_THREADS=1 .browser/bin/python -m pytest -c tests/browser/pytest.ini --rootdir tests/browser tests/browser $(ARGS)

pictures: setup .browser/installed  #: Make the pictures of README and docs (after compare; ARGS='--only ui.png')
	OMP_NUM_THREADS=1 .browser/bin/python -m tests.browser.pictures --compare $(OUT) $(ARGS)

.browser/installed: tests/browser/requirements.txt
	$(PYTHON) -m venv .browser
	.browser/bin/python -m pip install --quiet -r $<
	touch $@

# Ray lies beside .venv, not in it: 500 MB that no other test needs.
fleet-test: setup .fleet/installed  #: Test fleets on Ray clusters of two nodes on this machine; ten minutes on two cores
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/.fleet $(BIN)/python -m pytest tests/deploy/fleet/on_ray $(ARGS)

.fleet/installed: pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --target $(@D) 'ray[data,serve]==2.60.0'
	touch $@

check: setup  ## Check lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	test ! -x $(BIN)/hadolint || $(BIN)/hadolint Dockerfile

# --no-verify: what looks like a key is not tried at its provider. The rest: placeholders of examples and tests.
audit: setup  #: Search the tracked files for passwords, keys and tokens
	git ls-files -z | xargs -0 $(BIN)/detect-secrets-hook --no-verify --exclude-secrets '^(none|keys)$$'
	@echo "no secrets in $$(git ls-files | wc -l) tracked files"

# OSV, since a mirror without PyPI's JSON pages makes pip-audit skip every package and report nothing.
audit-versions: .audit-$(PIP_AUDIT)/installed  #: Compare constraints.txt with OSV's known vulnerabilities (needs the network)
	.audit-$(PIP_AUDIT)/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict \
	--vulnerability-service osv --progress-spinner off $(ARGS)

.audit-$(PIP_AUDIT)/installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet pip-audit==$(PIP_AUDIT)
	touch $@

asan: setup  #: Run the tests of the CPU's C++ kernels under AddressSanitizer (needs g++)
	LONGSHORE_CACHE=build/asan CXX=tests/kernels/cpu/asan-g++ ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	$(BIN)/python -m pytest tests/kernels/cpu --matrix $(ARGS)

image-check: setup  #: Build the image without Docker (as root, with buildah and debootstrap) and test it
	packaging/image/check

variants: setup  #: Compile the kernels' variants for every GPU and check the code (ARGS='-k prefill-256')
	$(EVERY_VARIANT) tests/kernels/compiled $(ARGS)

kernels: variants .triton-$(TRITON_FLOOR)/installed  #: Run variants, then variants and all kernel tests with the oldest supported Triton
	PYTHONPATH=.triton-$(TRITON_FLOOR) $(EVERY_VARIANT) tests/kernels $(ARGS)

kernels-floor: .triton-$(TRITON_FLOOR)/installed  #: Compile a sample of the variants with the oldest supported Triton
	PYTHONPATH=.triton-$(TRITON_FLOOR) $(PYTEST) tests/kernels/compiled $(ARGS)

.triton-$(TRITON_FLOOR)/installed: .venv/installed  # oldest supported Triton, beside the pinned one
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) triton==$(TRITON_FLOOR)
	touch $@

gpu: $(if $(filter $(BIN)/%,$(GPU_PYTHON)),setup)  ## Check and time kernels and engine on this GPU (ARGS='--sections decode --out DIR')
	$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

format: setup  #: Format the code and apply ruff's fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup  ## Write docs/reference/ (configuration, limits, contract) from the tables of the code
	$(BIN)/python -c "from container.configuration.report import markdown_lines; print(*markdown_lines(), sep='\n')" > docs/reference/configuration.md
	$(BIN)/python -c "from container.configuration.report import limit_lines; print(*limit_lines(), sep='\n')" > docs/reference/limits.md
	$(BIN)/python -c "from pathlib import Path; from container.front_end.contract import with_tables; page = Path('docs/reference/contract.md'); page.write_text(with_tables(page.read_text()))"

clean:  #: Remove .venv and caches
	rm -rf .venv .conformance tests/conformance/node/node_modules .suites .vllm .browser .fleet .audit-* .triton-$(TRITON_FLOOR) .pytest_cache .ruff_cache .hypothesis *.egg-info
