"""What is there when a process is ready is looked at no more; what comes later is."""

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
assert before() is None, "garbage is kept for ever"
assert gc.get_freeze_count() > 1000
assert not any(kept is other for other in gc.get_objects()), "it is looked at"
after = made()
gc.enable()
gc.collect()
assert after() is None, "nothing is collected any more"
assert gc.get_threshold()[0] > 700
"""


def test_garbage_goes_and_the_rest_is_spared() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)  # its own process: this one shall go on as it was
