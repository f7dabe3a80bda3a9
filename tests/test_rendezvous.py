"""The port of a process group is held from the moment it is chosen, so nothing else can take it meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import socket
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch

from verl_atgrpo.trainer.rendezvous import MeetingWorker, go_to, listen, meet


def _rank(rank: int, taken: int, link: Connection) -> None:
    """One process of a group of two, whose given port somebody else listens on."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken), RANK=str(rank), WORLD_SIZE="2")
    if rank == 0:
        store = listen()
        link.send(store.port)
    go_to(link.recv())
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    ranks = torch.tensor([rank + 1])
    torch.distributed.all_reduce(ranks)
    link.send((int(ranks), os.environ["MASTER_PORT"]))
    torch.distributed.destroy_process_group()


def test_a_group_meets_although_its_given_port_was_taken() -> None:
    context = multiprocessing.get_context("spawn")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        links, processes = [], []
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(target=_rank, args=(rank, taken, there), daemon=True)
            process.start()
            links.append(here)
            processes.append(process)
        port = links[0].recv()
        for link in links:
            link.send(port)
        results = [link.recv() for link in links]
        for process in processes:
            process.join(60)
    assert port != taken
    assert results == [(3, str(port))] * 2
    assert [process.exitcode for process in processes] == [0, 0]


def test_a_chosen_port_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    first, second = listen(), listen()
    assert first.port != second.port
    with socket.socket() as other, pytest.raises(OSError, match="already in use"):
        other.bind(("", first.port))


def test_all_processes_go_where_the_first_one_listens() -> None:
    class Group:
        went: int | None = None

        def listen(self) -> int:
            return 4711

        def go_to(self, port: int) -> None:
            self.went = port

    group = Group()
    meet(group)  # type: ignore[arg-type]
    assert group.went == 4711


def test_the_first_process_alone_listens() -> None:
    from verl.single_controller.base.decorator import MAGIC_ATTR, Execute

    assert getattr(MeetingWorker.listen, MAGIC_ATTR)["execute_mode"] == Execute.RANK_ZERO
    assert getattr(MeetingWorker.go_to, MAGIC_ATTR)["execute_mode"] == Execute.ALL
