"""The garbage collector ignores objects from before `freeze_startup_objects`, and collects later ones."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, weakref
from verl_atgrpo.compat import freeze_startup_objects

class Node:
    def __init__(self):
        self.itself = self

def made():
    node = Node()
    return weakref.ref(node)

gc.disable()
before, kept = made(), Node()
freeze_startup_objects()
assert before() is None, "garbage is never collected"
assert gc.get_freeze_count() > 1000
assert not any(kept is other for other in gc.get_objects()), "it is still tracked"
after = made()
gc.enable()
gc.collect()
assert after() is None, "later garbage is not collected"
assert gc.get_threshold()[0] > 700
"""


def test_startup_objects_are_frozen_and_garbage_is_collected() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)  # freezing affects its process
