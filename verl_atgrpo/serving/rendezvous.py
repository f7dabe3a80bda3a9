"""Where the processes of a policy find each other: at a port that is held from the moment it is chosen.

verl asks for a free port before it starts the processes, and the first of them listens on it when it has loaded its
libraries, many seconds later; any connection of Ray's that was opened meanwhile may have been given that port.
"""

from __future__ import annotations

import os

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from verl.single_controller.base.decorator import Dispatch, Execute, register
from verl.single_controller.ray import RayWorkerGroup
from verl.workers.engine_workers import ActorRolloutRefWorker


def listen() -> TCPStore:
    """Opens the store of a process group at a port of the system's choice; to be kept until the group is made.

    In the process of rank 0. torch takes a store that this process has open at `MASTER_PORT` for its own, because both
    are `multi_tenant`.
    """
    return TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False, multi_tenant=True)


def go_to(port: int) -> None:
    """Makes this process look for its group at `port`."""
    os.environ["MASTER_PORT"] = str(port)


class MeetingWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's worker, which can choose the port of its process group itself."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)  # type: ignore[untyped-decorator]
    def listen(self) -> int:
        """Returns the port at which the first process listens from now on."""
        self._store = listen()
        return int(self._store.port)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def go_to(self, port: int) -> None:
        """Makes every process look for its group at `port`."""
        go_to(port)


def meet(workers: RayWorkerGroup) -> None:
    """Gives the processes of a worker group a port of their own; to be called before their models are loaded."""
    workers.go_to(workers.listen())
