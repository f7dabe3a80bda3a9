#!/usr/bin/env bash
# Installs verl, vLLM for CPU and the development tools into the virtual environment $1 (made if missing).
set -euo pipefail
venv=$1
python=${PYTHON:-python3}
torch=torch==2.13.0+cpu

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# Without python3-venv a Debian leaves an environment without pip.
if ! { "$venv/bin/python" -m pip --version || "$venv/bin/python" -m ensurepip; } >/dev/null 2>&1; then
    echo "$venv has no pip: remove it and start again, on Debian and Ubuntu after 'apt install python3-venv'" >&2
    exit 1
fi
pip="$venv/bin/python -m pip --disable-pip-version-check"
# Python compiles what is imported: a quarter of the 30,000 files, at their first import.
install="$pip install --quiet --no-compile"
$install --upgrade 'pip>=24'

# The registry's default torch is the CUDA build (several GB): install the CPU build, from the configured index if it
# has one, else from PyTorch's.
$install "$torch" 2>/dev/null ||
    $install --extra-index-url https://download.pytorch.org/whl/cpu "$torch"

rm -rf build # pip builds in the tree, and takes what an earlier build left, of modules that are gone, too
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
