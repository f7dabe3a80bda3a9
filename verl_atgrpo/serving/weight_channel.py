"""The name of the socket through which a worker hands weights to its server, unlike any other job's on the machine.

verl names it after Ray's job, and every Ray cluster counts its jobs from 1: two trainings side by side, each with a
local cluster, would take each other's weights, or wait for them.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import ray

_JOB = "VERL_RAY_JOB_ID"
"""The variable from which verl's vLLM worker takes its part of the name."""


def job_name() -> str:
    """Returns Ray's number of this job, and eight digits of a hash of its cluster's address."""
    context = ray.get_runtime_context()
    cluster = hashlib.sha256(context.gcs_address.encode()).hexdigest()[:8]
    return f"{context.get_job_id()}-{cluster}"


def name_receiver() -> None:
    """Has the engines that this server starts listen to this job's workers."""
    os.environ[_JOB] = job_name()


def name_sender(adapter: Any) -> None:
    """Has verl's rollout adapter send to this job's servers.

    Raises RuntimeError if verl names its channel in another way than this package knows.
    """
    job_id = ray.get_runtime_context().get_job_id()
    renamed = adapter.zmq_handle.replace(f"-{job_id}-replica-", f"-{job_name()}-replica-")
    if renamed == adapter.zmq_handle:
        raise RuntimeError(f"verl's weight channel {adapter.zmq_handle!r} does not name the job {job_id} any more")
    adapter.zmq_handle = renamed
