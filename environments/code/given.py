"""What graders of contest problems give every program: names of the standard library, deep recursion.

LiveCodeBench's grader and verl's `prime_code` put star imports before a program, APPS's its own imports. All of them
are given here but numpy, which the sandbox lacks. Only the imports that a program's words call for are made: all
together cost more time than many programs need.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import re

# Later ones win, as in the graders; `typing` comes first, so that `Counter` is the one of `collections`.
_STARS = (
    *("typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
_MODULES = (*_STARS, "time", "fractions")
_WORD = re.compile(r"[^\W\d]\w*")
_DEEP = """
import resource, sys
sys.setrecursionlimit(50_000)
getattr(sys, "set_int_max_str_digits", id)(50_000)
_hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
resource.setrlimit(resource.RLIMIT_STACK, (64 << 20 if _hard < 0 else min(_hard, 64 << 20), _hard))
del resource, sys, _hard
"""
"""LiveCodeBench's limits on recursion and digits, and a stack that has room for such recursion in C as well."""


def contest_names(program: str, entry_point: str | None) -> str:
    """Returns the code that gives a program the names that it may use, except the name that it has to define."""
    wanted = (set(_WORD.findall(program)) & _statements().keys()) - {entry_point}
    return _DEEP + "\n".join(_statements()[name] for name in sorted(wanted))


@functools.cache
def _statements() -> dict[str, str]:
    """Returns name -> the statement that imports it."""
    statements = {}
    for name in _STARS:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", None) or [key for key in dir(module) if key[0] != "_"]:
            statements[public] = f"from {name} import {public}"
    for name in dir(builtins):  # star imports of the graders end with these
        statements.pop(name, None)
    return statements | {name: f"import {name}" for name in _MODULES}
