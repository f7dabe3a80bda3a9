"""All policies of a team: they start, update and sync weights at the same time, or one after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from verl.utils.debug import marked_timer

from verl_atgrpo.train.rows.batch import Batch
from verl_atgrpo.train.trainer.policy_unit import PolicyUnit, Update

Result = TypeVar("Result")


def for_all(units: Sequence[PolicyUnit], action: Callable[[PolicyUnit], Result], concurrent: bool) -> list[Result]:
    """Calls `action` with every policy; returns the results in their order.

    Raises the first error: concurrently after all policies are done, otherwise before the next policy.
    """
    if not concurrent:
        return [action(unit) for unit in units]
    with ThreadPoolExecutor(max_workers=len(units)) as executor:
        return [done.result() for done in [executor.submit(action, unit) for unit in units]]


def train_all(
    units: Sequence[PolicyUnit],
    batches: Mapping[str, Batch],
    global_steps: int,
    concurrent: bool,
    timing: dict[str, float],
) -> dict[str, Update]:
    """Updates policies on their rows; returns policy -> update, and adds the seconds of all stages to `timing`."""
    done: list[PolicyUnit] = []

    def train(unit: PolicyUnit) -> Update:
        if not concurrent and done and done[-1].host is not unit.host:
            with marked_timer("empty_cache", timing):
                done[-1].empty_cache()  # of its own processes, which have used the same devices
        done.append(unit)
        return unit.train(batches[unit.name], global_steps)

    if not units:
        return {}
    with marked_timer("policies", timing, color="red"):
        updates = for_all(units, train, concurrent)
    for stage in {stage for update in updates for stage in update.timing}:
        # Adapters of a base are updated one after the other in any case.
        seconds: dict[str, float] = defaultdict(float)
        for unit, update in zip(units, updates, strict=True):
            seconds[unit.host.name] += update.timing.get(stage, 0.0)
        timing[stage] = (max if concurrent else sum)(seconds.values())
    return {unit.name: update for unit, update in zip(units, updates, strict=True)}


class TeamSync:
    """The weight sync of all policies, with the interface of verl's `CheckpointEngineManager`."""

    def __init__(self, units: Sequence[PolicyUnit], concurrent: bool) -> None:
        self._units = units
        self._concurrent = concurrent

    def sleep_replicas(self) -> None:
        """Puts every policy's servers to sleep."""
        for_all(self._units, PolicyUnit.sleep_servers, self._concurrent)

    def update_weights(self, global_steps: int) -> None:
        """Wakes every policy's servers with its weights, frozen ones included: sleep discards the weights.

        On shared devices all training workers empty their caches first: the first server that wakes or restarts needs
        the memory that the last worker has cached during its update or checkpoint.
        """
        if not self._concurrent:
            for_all(self._units, PolicyUnit.empty_cache, concurrent=False)
        for_all(self._units, lambda unit: unit.push_weights(global_steps), self._concurrent)

    def abort_replicas(self) -> None:
        """Interrupts every policy's servers, frozen ones included: all sleep during the update."""
        for_all(self._units, PolicyUnit.interrupt_servers, self._concurrent)

    def resume_generation_replicas(self) -> None:
        """Has every policy's servers accept requests again."""
        for_all(self._units, PolicyUnit.resume_servers, self._concurrent)
