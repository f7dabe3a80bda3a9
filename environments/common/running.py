"""The form in which programs of agents are run: as `python program.py` runs them."""

from __future__ import annotations

BUILT = "built\n"
"""What a program has written to standard error, before anything else, once it compiles."""


def runnable(program: str, given: str = "") -> str:
    """Returns source for `run_python` that runs a program with `exit` and `quit`, which `python -S` lacks.

    Warnings are off: the compiler's would come before `BUILT`.

    Args:
        program: a program as an agent wrote it, which may not compile.
        given: trusted code that runs before it, in its namespace.
    """
    return (
        "__import__('warnings').simplefilter('ignore')\n"
        "__import__('builtins').exit = __import__('builtins').quit = __import__('sys').exit\n"
        f"__program__ = compile({program!r}, 'program.py', 'exec', dont_inherit=True)\n"
        f"__import__('sys').stderr.write({BUILT!r})\n"
        f"exec({given!r})\n"
        "exec(__program__)\n"
    )
