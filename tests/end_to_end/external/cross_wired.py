"""Loaded into a job by VERL_USE_EXTERNAL_MODULES: every policy sends its weights to replica 0, as in plain verl."""

from __future__ import annotations

from types import ModuleType

from verl_atgrpo.compat import when_imported


def _cross(policy_worker: ModuleType) -> None:
    worker = policy_worker.PolicyWorker
    renumber = worker.__init__

    def counted_from_0(self: object, *args: object, first_replica: int = 0, **kwargs: object) -> None:
        renumber(self, *args, first_replica=0, **kwargs)

    worker.__init__ = counted_from_0


when_imported("verl_atgrpo.serving.workers", _cross)
