"""The process that compares answers: math-verify, which may run for hours on a hostile one, under a limit of its own.

math-verify's time limits need the main thread and do not end what runs in C (`9^{9^{9}}`). Here the kernel ends the
process when one comparison has used up its CPU time, and `math_answers` starts another. Nothing that math-verify or
sympy raises on a text needs handling: both `parse` and `verify` turn every exception into "nothing" and "not equal".
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
"""CPU time of one comparison: about 50 times what one takes."""
MEMORY_BYTES = 2 << 30


def main() -> None:
    """Answers every line of the input, a JSON list of two LaTeX texts, with a line `1` (equal) or `0`."""
    from math_verify import LatexExtractionConfig, parse, verify

    verdicts = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no verdict
    form = (LatexExtractionConfig(boxed_match_priority=0),)  # LaTeX alone: no number fished out of a sentence

    @functools.lru_cache(maxsize=1024)
    def parsed(text: str) -> list[Any]:
        boxed = f"\\boxed{{{text}}}"
        return list(parse(boxed, form, fallback_mode="no_fallback", parsing_timeout=None))  # type: ignore[arg-type]

    def includes(gold: str, answer: str) -> bool:
        return bool(verify(parsed(gold), parsed(answer), allow_set_relation_comp=True, timeout_seconds=None))

    def equal(one: str, other: str) -> bool:
        # Both ways: `verify` reads the second one leniently, 17 = 18 as 18.
        return includes(one, other) and includes(other, one)

    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    equal(r"\frac{1}{3}", r"\sqrt{2}")  # the first comparison builds the grammar
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        verdict = equal(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        verdicts.write("1\n" if verdict else "0\n")
        verdicts.flush()


if __name__ == "__main__":
    main()
