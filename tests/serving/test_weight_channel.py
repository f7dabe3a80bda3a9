"""Two jobs on one machine, each the first of its own Ray cluster, have different weight sockets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

import ray
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_atgrpo.train.serving.server import name_receiver, name_sender


def _in_job(monkeypatch: pytest.MonkeyPatch, cluster: str) -> None:
    """Makes this process the first job of the cluster with this address."""
    context = SimpleNamespace(gcs_address=cluster, get_job_id=lambda: "01000000")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)


def _sender(first_replica: int = 0) -> str:
    adapter = SimpleNamespace(zmq_handle="ipc:///tmp/rl-colocate-zmq-01000000-replica-1-rank-0.sock", replica_rank=1)
    name_sender(adapter, first_replica)
    assert adapter.replica_rank == first_replica + 1
    return adapter.zmq_handle


def _receiver(monkeypatch: pytest.MonkeyPatch, replica: int = 1) -> str:
    """Returns the socket of verl's worker in the engine."""
    monkeypatch.setenv("VERL_RAY_JOB_ID", "01000000")
    monkeypatch.setenv("VERL_REPLICA_RANK", str(replica))
    name_receiver()
    worker = SimpleNamespace(model_runner=SimpleNamespace(), local_rank=0)
    return str(vLLMColocateWorkerExtension._get_zmq_handle(worker))


@pytest.mark.parametrize("cluster", ["192.0.2.2:6379", "[2001:db8:85a3:8d3:1319:8a2e:370:7348]:65535"])
def test_both_ends_have_the_same_name(monkeypatch: pytest.MonkeyPatch, cluster: str) -> None:
    _in_job(monkeypatch, cluster)
    channel = _sender()
    assert channel == _receiver(monkeypatch)
    assert _sender(first_replica=4) == _receiver(monkeypatch, replica=5)
    assert len(channel.removeprefix("ipc://")) <= 107  # limit of a socket's address on Linux


def test_first_jobs_of_two_clusters_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for cluster in ("192.0.2.2:6379", "192.0.2.2:51011"):
        _in_job(monkeypatch, cluster)
        names |= {_sender(), _receiver(monkeypatch)}
    assert len(names) == 2


def test_a_socket_name_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _in_job(monkeypatch, "192.0.2.2:6379")
    with pytest.raises(RuntimeError, match=r"'ipc:///tmp/elsewhere\.sock' does not name job 01000000 and replica 0"):
        name_sender(SimpleNamespace(zmq_handle="ipc:///tmp/elsewhere.sock", replica_rank=0))
