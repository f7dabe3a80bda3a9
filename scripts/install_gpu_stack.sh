#!/usr/bin/env bash
# Installs verl and vLLM for a GPU with CUDA 13 into the virtual environment $1 (made if missing).
# flash-attn is left out: there is no wheel for this torch, and `hardware=1_gpu` does without.
set -euo pipefail
venv=$1
driver=580 # the first for CUDA 13

if ! version=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || [ -z "$version" ]; then
    echo "nvidia-smi shows no GPU: on a machine without one leave HARDWARE out" >&2
    exit 1
fi
if [ "${version%%.*}" -lt "$driver" ]; then
    echo "the GPU's driver is $version: vLLM's torch is for CUDA 13, which needs $driver or later" >&2
    exit 1
fi
if ! command -v cc >/dev/null; then
    echo "there is no C compiler, with which triton builds what starts its kernels: apt install build-essential" >&2
    exit 1
fi
. "$(dirname "$0")/open_venv.sh"
if ! "$venv/bin/python" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_paths()["include"], "Python.h"))' 2>/dev/null; then
    echo "there is no Python.h, which triton's compilation needs: apt install python3-dev" >&2
    exit 1
fi
$install '.[gpu,math,search]'
$pip uninstall --quiet --yes verl-atgrpo
# A job starts ten processes, each of which would compile what it imports: its start took 200 s, 100 with this.
"$venv/bin/python" -m compileall -qq -j 0 "$venv"/lib/python3*/site-packages || true # some files are templates
