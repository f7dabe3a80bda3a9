# Sourced by the scripts that install a stack: opens the virtual environment $venv, made with $PYTHON if missing, and sets
# $pip and $install, the commands.
python=${PYTHON:-python3}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# Without python3-venv a Debian leaves an environment without pip.
if ! { "$venv/bin/python" -m pip --version || "$venv/bin/python" -m ensurepip; } >/dev/null 2>&1; then
    echo "$venv has no pip: remove it and start again, on Debian and Ubuntu after 'apt install python3-venv'" >&2
    exit 1
fi
pip="$venv/bin/python -m pip --disable-pip-version-check"
# Python compiles what is imported: on the CPU a quarter of the 30,000 files, at their first import.
install="$pip install --quiet --no-compile"
$install --upgrade 'pip>=24'
rm -rf build # pip builds in the tree, and takes what an earlier build left, of modules that are gone, too
