"""What vLLM's own processes need to share two cores with everything else."""

from __future__ import annotations

from types import ModuleType

from verl_atgrpo.import_hooks import when_imported

_LONGEST_WAIT_MS = 2


def share_the_cores() -> None:
    """Makes vLLM's worker wait for work instead of spinning for it.

    It spins for a second after every message, which suits a GPU server with cores to spare; here it
    would take one of two cores from the trainer and from the rest of the rollout.
    """
    when_imported("vllm.distributed.device_communicators.shm_broadcast", _wait_at_once)


def _wait_at_once(shm_broadcast: ModuleType) -> None:
    wait = shm_broadcast.SpinCondition.wait

    def wait_without_spinning(self: object, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = -1.0  # type: ignore[attr-defined]
        # Not longer: the notification is sent before a slow reader listens, and would be missed.
        wait(self, min(timeout_ms or _LONGEST_WAIT_MS, _LONGEST_WAIT_MS))

    shm_broadcast.SpinCondition.wait = wait_without_spinning
