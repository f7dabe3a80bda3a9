"""What every benchmark begins with: the modules of the tests can be imported, and its options."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
if str(TESTS) not in sys.path:
    sys.path.append(str(TESTS))


def parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Returns a parser that shows the script's docstring, with an option for each default.

    An option has the type of its default, or of the items of a list; False makes a flag, a type an option without
    a default, which must be given.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if default is False:
            made.add_argument(option, action="store_true")
        elif isinstance(default, type):
            made.add_argument(option, type=default, required=True)
        elif isinstance(default, list):
            made.add_argument(option, type=type(default[0]), nargs="+", default=default)
        else:
            made.add_argument(option, type=type(default), default=default)
    return made
