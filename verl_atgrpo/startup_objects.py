"""What a long-lived process imports and sets up stays, so the garbage collector need not look at it again."""

from __future__ import annotations

import gc

_YOUNG = 10_000
"""New objects that are looked at together. With Python's 700, those of requests under way are looked at many times."""


def spare_startup_objects() -> None:
    """Takes everything that is there now out of the garbage collector's sight, once garbage has been collected.

    Python looks at all objects again and again as new ones come, and torch, Ray, verl and vLLM bring a million. A
    process that serves requests calls this when it is ready to, as vLLM's own server does.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
