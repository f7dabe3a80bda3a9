"""The port of a process group is bound as soon as it is chosen, so no other process can take it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from waiting import HANG

pytest.importorskip("verl")

from verl_atgrpo.train.engine.worker import TrainerWorker

_SECOND_RANK = """
import torch
torch.distributed.init_process_group("gloo")
torch.distributed.all_reduce(torch.tensor([2]))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_a_group_connects_although_its_configured_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = other.getsockname()[1]
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": taken, "RANK": 0, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        worker = SimpleNamespace()
        port = TrainerWorker.reserve_port(worker)
        assert port != taken
        TrainerWorker.use_port(worker, port)
        second = subprocess.Popen([sys.executable, "-c", _SECOND_RANK], env={**os.environ, "RANK": "1"})
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=HANG))
        try:
            total = torch.tensor([1])
            torch.distributed.all_reduce(total)
        finally:
            torch.distributed.destroy_process_group()
        assert int(total) == 3
        assert second.wait(HANG) == 0


def test_a_chosen_port_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    workers = SimpleNamespace(), SimpleNamespace()
    first, second = map(TrainerWorker.reserve_port, workers)
    assert first != second
    with socket.socket() as other, pytest.raises(OSError, match="already in use"):
        other.bind(("", first))


def test_only_the_first_process_opens_a_store() -> None:
    from verl.single_controller.base.decorator import MAGIC_ATTR, Execute

    assert getattr(TrainerWorker.reserve_port, MAGIC_ATTR)["execute_mode"] == Execute.RANK_ZERO
    assert getattr(TrainerWorker.use_port, MAGIC_ATTR)["execute_mode"] == Execute.ALL
