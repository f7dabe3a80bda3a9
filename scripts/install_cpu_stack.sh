#!/usr/bin/env bash
# Installs verl, vLLM for CPU and the development tools into the virtual environment $1 (made if missing).
set -euo pipefail
venv=$1
torch=torch==2.13.0+cpu
. "$(dirname "$0")/open_venv.sh"

# The registry's default torch is the CUDA build (several GB): install the CPU build, from the configured index if it
# has one, else from PyTorch's.
$install "$torch" 2>/dev/null ||
    $install --extra-index-url https://download.pytorch.org/whl/cpu "$torch"

constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
echo "$torch" >"$constraints"
$install --constraint "$constraints" '.[cpu,dev,docs]'
# Builds a C package; without a compiler, only its tests are skipped.
$install --constraint "$constraints" '.[reasoning-gym]' ||
    echo "reasoning-gym was not installed; to see why: pip install 'verl-atgrpo[reasoning-gym]'" >&2
$pip uninstall --quiet --yes verl-atgrpo
# Programs in the sandbox may not write what they compile: each would compile its libraries again, sympy for two seconds.
"$venv/bin/python" -m compileall -q "$venv"/lib/python3*/site-packages/{numpy,sympy,mpmath}
