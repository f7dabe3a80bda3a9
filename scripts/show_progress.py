"""Shows verl's progress bar and the figures worth watching; the whole log goes to a file beside the metrics."""

from __future__ import annotations

import re
import sys

BAR = re.compile(rb"Training Progress:[^\r\n]*")
WORTH_SHOWING = re.compile(rb"verl-atgrpo:|Error|Traceback|validation metrics|acc/mean@|defect|Killed")
PREFIX = re.compile(rb"\x1b\[[0-9;]*m|\([A-Za-z0-9_ ]+pid=\d+\) ")


def main() -> None:
    """Copies standard input to standard output, leaving out what only a developer of verl wants to read."""
    out = sys.stdout.buffer
    for line in sys.stdin.buffer:
        bars = BAR.findall(line)
        if bars:
            out.write(b"\r" + PREFIX.sub(b"", bars[-1]).rstrip()[:110])
        elif WORTH_SHOWING.search(line):
            out.write(b"\n" + PREFIX.sub(b"", line).rstrip())
        out.flush()
    out.write(b"\n")


if __name__ == "__main__":
    main()
