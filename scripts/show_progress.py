"""Filters a training log for verl's progress bar, validation success and errors; `make train` saves the whole log."""

from __future__ import annotations

import re
import sys

BAR = re.compile(rb"Training Progress:(?:(?!Training Progress:)[^\r\n])*")
VALIDATION = re.compile(rb"step:(\d+) - .*?val-core/\S+?/acc/mean@\d+:(?:np\.float64\()?([0-9.]+)")
TROUBLE = re.compile(rb"verl-atgrpo:|Traceback|\w(Error|Exception): |: defect")
HARMLESS = re.compile(rb"Warning: ")
PREFIX = re.compile(rb"\x1b\[[0-9;]*m|\([A-Za-z0-9_ ]+pid=\d+\) ")


def main() -> None:
    """Copies the relevant lines of standard input to standard output."""
    out = sys.stdout.buffer
    for line in sys.stdin.buffer:
        bars, validation = BAR.findall(line), VALIDATION.search(line)
        if validation:
            out.write(b"\nstep %s: validation success %.1f%%\n" % (validation[1], 100 * float(validation[2])))
        elif TROUBLE.search(line) and not HARMLESS.search(line):
            out.write(b"\n" + PREFIX.sub(b"", line).rstrip() + b"\n")
        elif bars:
            out.write(b"\r" + PREFIX.sub(b"", bars[-1]).rstrip()[:110])
        out.flush()
    out.write(b"\n")


if __name__ == "__main__":
    main()
