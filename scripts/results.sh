#!/usr/bin/env bash
# The README's comparisons, three seeds each, from the same starting models: the team with one shared policy and with
# one for each role (trained by AT-GRPO), the latter also with swapped roles, and the single agent (trained by GRPO).
# About two hours on 2 cores; what is done already is kept. Called by `make results`.
set -euo pipefail
bin=${BIN:-.venv/bin}
out=runs/results
seeds=${SEEDS:-0 1 2}

# Writes the most memory that the machine used so far to $1, every second, until it is stopped.
watch_memory() {
    local most=0 used
    while sleep 1; do
        used=$(awk '/^MemTotal/ {total = $2} /^MemAvailable/ {free = $2} END {print total - free}' /proc/meminfo)
        if [ "$used" -gt "$most" ]; then
            most=$used
            echo "$most" >"$1"
        fi
    done
}

# run NAME RECIPE OVERRIDES...: trains once; leaves metrics.jsonl, train.log, memory (KiB) and done.
run() {
    local folder=$out/$1 recipe=$2 watcher
    shift 2
    [ -e "$folder/done" ] && return
    mkdir -p "$folder"
    rm -f "$folder/metrics.jsonl"
    watch_memory "$folder/memory" &
    watcher=$!
    VERL_FILE_LOGGER_PATH=$folder/metrics.jsonl "$bin/python" -m verl.trainer.main_ppo --config-name="$recipe" "$@" \
        2>&1 | tee "$folder/train.log" | "$bin/python" scripts/show_progress.py
    kill "$watcher"
    "$bin/verl-atgrpo" summary "$folder/metrics.jsonl" | tee "$folder/done"
}

for seed in $seeds; do
    model=$out/model_$seed second=$out/model_1$seed
    "$bin/verl-atgrpo" make-model "$model" --seed "$seed"
    "$bin/verl-atgrpo" make-model "$second" --seed "1$seed"
    common=(at_grpo.seed="$seed" data.seed="$seed" actor_rollout_ref.model.path="$model")
    once=(trainer.resume_mode=disable trainer.save_freq=-1)
    for recipe in plan_path_cpu plan_path_cpu_single; do
        run "${recipe}_$seed" $recipe "${common[@]}" "${once[@]}"
    done
    roles=("${common[@]}" at_grpo.policies.tool_user.model.path="$model" at_grpo.policies.planner.model.path="$second"
        trainer.default_local_dir="$out/plan_path_cpu_roles_$seed/checkpoints")
    run "plan_path_cpu_roles_$seed" plan_path_cpu_roles "${roles[@]}" trainer.save_freq=30
    run "plan_path_cpu_swapped_$seed" plan_path_cpu_roles "${roles[@]}" trainer.val_only=true \
        'at_grpo.val_agents={tool_user: planner, planner: tool_user}'
done

curves=()
for seed in $seeds; do
    curves+=("team of two, AT-GRPO=$out/plan_path_cpu_$seed/metrics.jsonl")
    curves+=("single agent, GRPO=$out/plan_path_cpu_single_$seed/metrics.jsonl")
done
for axis in seconds tokens; do
    "$bin/verl-atgrpo" plot "${curves[@]}" --against $axis --out "docs/images/plan_path_cpu_$axis.png"
done
# shellcheck disable=SC2086
"$bin/python" scripts/results_tables.py $out $seeds
