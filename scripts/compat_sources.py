"""Writes verl_atgrpo/compat_sources.json: digests of the functions of the installed verl that we use.

Run it once the tests have passed with another verl.
"""

from __future__ import annotations

import importlib.metadata
import json

from verl_atgrpo import compat


def sources() -> dict[str, object]:
    """Returns the content of the file."""
    symbols = {*compat.SYMBOLS, *compat.CPU_SYMBOLS, *compat.EVALUATION_SYMBOLS}
    digests = {symbol.name: digest for symbol in symbols if (digest := symbol.digest()) is not None}
    return {"verl": importlib.metadata.version("verl"), "sources": dict(sorted(digests.items()))}


if __name__ == "__main__":
    compat.SOURCES.write_text(json.dumps(sources(), indent=1) + "\n")
