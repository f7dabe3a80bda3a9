#!/usr/bin/env bash
# The README's comparison: the team with AT-GRPO and the single agent with GRPO, from the same starting
# models, three seeds each. About an hour on 2 cores; what is done already is kept. Called by `make results`.
set -euo pipefail
bin=${BIN:-.venv/bin}
out=runs/results

for seed in ${SEEDS:-0 1 2}; do
    model=$out/model_$seed
    "$bin/verl-atgrpo" make-model "$model" --seed "$seed"
    for recipe in plan_path_cpu plan_path_cpu_single; do
        run=$out/${recipe}_$seed
        [ -e "$run/done" ] && continue
        mkdir -p "$run"
        rm -f "$run/metrics.jsonl"
        VERL_FILE_LOGGER_PATH=$run/metrics.jsonl "$bin/python" -m verl.trainer.main_ppo --config-name=$recipe \
            at_grpo.seed="$seed" data.seed="$seed" actor_rollout_ref.model.path="$model" \
            trainer.resume_mode=disable trainer.save_freq=-1 trainer.default_local_dir="$run/checkpoints" \
            2>&1 | tee "$run/train.log" | "$bin/python" scripts/show_progress.py
        "$bin/verl-atgrpo" summary "$run/metrics.jsonl" | tee "$run/done"
    done
done

curves=()
for seed in ${SEEDS:-0 1 2}; do
    curves+=("team of two, AT-GRPO=$out/plan_path_cpu_$seed/metrics.jsonl")
    curves+=("single agent, GRPO=$out/plan_path_cpu_single_$seed/metrics.jsonl")
done
for axis in seconds tokens; do
    "$bin/verl-atgrpo" plot "${curves[@]}" --against $axis --out "docs/images/plan_path_cpu_$axis.png"
done
