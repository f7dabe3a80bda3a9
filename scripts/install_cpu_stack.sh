#!/usr/bin/env bash
# Installs verl, vLLM for CPU and the development tools into the virtual environment $1 (made if missing).
set -euo pipefail
venv=$1
python=${PYTHON:-python3}
torch=torch==2.13.0+cpu

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check"
$pip install --quiet --upgrade 'pip>=24'

# The registry's own build of torch is for CUDA (several GB): take the CPU build, from a configured
# index if there is one that has it, else from PyTorch's.
$pip install --quiet "$torch" 2>/dev/null ||
    $pip install --quiet --extra-index-url https://download.pytorch.org/whl/cpu "$torch"

constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
echo "$torch" >"$constraints"
$pip install --quiet --constraint "$constraints" '.[cpu,dev,docs]'
# It builds a package in C: without a compiler its tests are skipped, and nothing else misses it.
$pip install --quiet --constraint "$constraints" '.[reasoning-gym]' ||
    echo "reasoning-gym was not installed; to see why: pip install 'verl-atgrpo[reasoning-gym]'" >&2
$pip uninstall --quiet --yes verl-atgrpo
