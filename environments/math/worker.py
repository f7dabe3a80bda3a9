"""The process that compares answers with math-verify, under a CPU time limit.

math-verify's own time limits need the main thread and do not interrupt C code (`9^{9^{9}}`). Here the kernel kills the
process when a comparison exceeds its CPU time, and `answers` starts another one. Exceptions of math-verify and sympy
need no handling: `parse` and `verify` catch all of them and return "nothing" and "not equal".
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import sys
from typing import Any

CPU_SECONDS = 0.5
"""CPU time of one comparison; a usual one takes a fiftieth."""
MEMORY_BYTES = 2 << 30


def main() -> None:
    """Reads lines with a JSON list of two LaTeX texts, and writes a line `1` (equal) or `0` for each."""
    from math_verify import LatexExtractionConfig, parse, verify

    verdicts = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries must not print into the verdicts
    form = (LatexExtractionConfig(boxed_match_priority=0),)  # only LaTeX: numbers in a sentence are ignored

    @functools.lru_cache(maxsize=1024)
    def parsed(text: str) -> list[Any]:
        boxed = f"\\boxed{{{text}}}"
        return list(parse(boxed, form, fallback_mode="no_fallback", parsing_timeout=None))  # type: ignore[arg-type]

    def includes(gold: str, answer: str) -> bool:
        return bool(verify(parsed(gold), parsed(answer), allow_set_relation_comp=True, timeout_seconds=None))

    def equal(one: str, other: str) -> bool:
        # Both directions: `verify` parses the second one leniently, 17 = 18 as 18.
        return includes(one, other) and includes(other, one)

    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    equal(r"\frac{1}{3}", r"\sqrt{2}")  # warm-up: the first comparison builds the grammar
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        verdict = equal(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        verdicts.write("1\n" if verdict else "0\n")
        verdicts.flush()


if __name__ == "__main__":
    main()
