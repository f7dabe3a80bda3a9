#!/usr/bin/env bash
# Installs verl, vLLM for CPU and the development tools into the virtual environment $1 (made if missing).
set -euo pipefail
venv=$1
python=${PYTHON:-python3}
torch=torch==2.13.0+cpu
# Python compiles what is imported: a quarter of the 30,000 files, at their first import.
export PIP_NO_COMPILE=1

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check"
$pip install --quiet --upgrade 'pip>=24'

# The registry's default torch is the CUDA build (several GB): install the CPU build, from the configured index if it
# has one, else from PyTorch's.
$pip install --quiet "$torch" 2>/dev/null ||
    $pip install --quiet --extra-index-url https://download.pytorch.org/whl/cpu "$torch"

constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
echo "$torch" >"$constraints"
$pip install --quiet --constraint "$constraints" '.[cpu,dev,docs]'
# Builds a C package; without a compiler, only its tests are skipped.
$pip install --quiet --constraint "$constraints" '.[reasoning-gym]' ||
    echo "reasoning-gym was not installed; to see why: pip install 'verl-atgrpo[reasoning-gym]'" >&2
$pip uninstall --quiet --yes verl-atgrpo
