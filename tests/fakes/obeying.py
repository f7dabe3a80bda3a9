"""A process under limits that does what a request says."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from verl_atgrpo.environments.common.limited import serve

CPU_SECONDS, MEMORY_BYTES = 0.15, 1 << 30


def obey(request: dict[str, Any]) -> object:
    """Returns what is asked for, or what it takes to be stopped."""
    match request["do"]:
        case "echo":
            return request["say"]
        case "print":
            sys.stdout.write("1\n2\n")
            os.write(1, b"3\n")
            return "quiet"
        case "count":
            return sum(1 for _ in iter(int, 1))
        case "power":
            return len(str(9**9**8))
        case "text":
            return "x" * 10**11
        case "list":
            return len([0] * 10**10)
        case "grow":
            grown = [""]
            while True:
                grown.append(grown[-1] + "x" * 10**6)
        case "match":
            import re

            return bool(re.fullmatch(r"(a+)+b", "a" * 60))
        case "deep":
            nested: list[Any] = []
            for _ in range(10**5):
                nested = [nested]
            try:
                return repr(nested)
            except RecursionError:
                return "too deep"
        case "wait":
            time.sleep(10_000)
        case "die":
            # Once: the file stands for the process that was killed.
            if not Path(request["file"]).exists():
                Path(request["file"]).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return "again"
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            sys.exit(2)
        case "raise":
            raise OSError("no such thing")
        case "pid":
            return os.getpid()
    return None


if __name__ == "__main__":
    serve(obey, lambda request: CPU_SECONDS, MEMORY_BYTES)
