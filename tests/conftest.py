"""Fixtures shared by the tests."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from waiting import HANG, wait_until

# Both depend on time: on a busy machine an example, or its generation, may be slow.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")

# Ray's workers would have niceness 15: beside other work trainings take several times longer than their share.
os.environ.setdefault("RAY_worker_niceness", "0")

Compose = Callable[..., object]
Leftovers = Callable[..., list[str]]


@pytest.fixture(scope="session", autouse=True)
def composed_once() -> Iterator[None]:
    """Merges the files of each recipe once a session."""
    try:
        import composing
    except ImportError:  # without Hydra
        yield
        return
    with composing.composed_once():
        yield


@pytest.fixture
def compose() -> Compose:
    """Returns a function that composes a recipe as `main_ppo --config-name=<recipe> <overrides>` does.

    The recipe may have groups behind it, as in "plan_path_cpu +mode=async".
    """
    pytest.importorskip("verl")
    from verl_atgrpo import recipes

    def build(recipe: str, *overrides: str) -> object:
        name, *groups = recipe.split()
        return recipes.compose(name, [*groups, *overrides])

    return build


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> object:
    """Returns a `FakeRollout`, which replaces TransferQueue's functions."""
    pytest.importorskip("verl")
    import transfer_queue as tq
    from fakes.fake_trainer import FakeRollout

    made = FakeRollout()
    for name in ("kv_list", "kv_clear", "kv_batch_put"):
        monkeypatch.setattr(tq, name, getattr(made, name))
    return made


@pytest.fixture
def cancelled_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces `ray.cancel`; returns the list of its arguments."""
    ray = pytest.importorskip("ray")
    calls: list[Any] = []
    monkeypatch.setattr(ray, "cancel", calls.append)
    return calls


@pytest.fixture
def leftovers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Leftovers]:
    """Returns a function that lists processes (including zombies) and temporary files left by programs.

    It waits up to `within` seconds for them to disappear: a launcher exits after it has reported its program's exit.
    """
    from processes import children

    from verl_atgrpo.sandbox import runner

    folder = tempfile.mkdtemp(prefix="leftovers-")  # excludes other processes of this machine
    os.chmod(folder, 0o711)
    monkeypatch.setattr(tempfile, "tempdir", folder)

    def found() -> set[int]:
        server = runner.POOL.server
        if server is None:
            return set(children(os.getpid()))
        return {*children(os.getpid()), *children(server.pid)} - {server.pid}

    def there() -> list[str]:
        # The locks of cores stay, for all processes.
        files = [name for name in os.listdir(folder) if not name.startswith("verl-atgrpo-cores-")]
        return [*map(str, sorted(found() - before)), *files]

    def left(within: float = HANG) -> list[str]:
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not there(), limit=within)
        return there()

    before = found()
    yield left
    shutil.rmtree(folder)


@pytest.fixture(scope="session", autouse=True)
def patient_sandbox() -> Iterator[None]:
    """Raises the default limits of programs far above what they need, and lets every test process have all cores."""
    from verl_atgrpo.sandbox import pool
    from verl_atgrpo.sandbox.runner import Limits, run_python

    patient = Limits(cpu_seconds=20, wall_seconds=HANG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(run_python.__kwdefaults__, "limits", patient)
        # Programs that hang on purpose would keep the other test processes from running theirs.
        patch.setattr(pool, "_LOCKS", f"{pool._LOCKS}-{os.getpid()}")
        locks = os.path.join(tempfile.gettempdir(), pool._LOCKS)
        yield
        shutil.rmtree(locks, ignore_errors=True)


@pytest.fixture
def start() -> Iterator[Callable[..., object]]:
    """Returns `training_jobs.start`; kills the remaining processes of its jobs at the end of the test."""
    import training_jobs

    jobs = []

    def begin(*arguments: Any, **environment: str) -> object:
        jobs.append(training_jobs.start(*arguments, **environment))
        return jobs[-1]

    yield begin
    for job in jobs:
        training_jobs.end(job)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A barely trained model for Plan-Path: quick to make, with diverse answers."""
    from filelock import FileLock

    from verl_atgrpo.lab.tiny_models.warm_start import WarmStart, make

    # One for all processes of the session, which keep what another has made.
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tied_model"
    with FileLock(f"{folder}.lock"):
        make(folder, WarmStart(clean_steps=60, noisy_steps=0))
    return folder


# What is imported is a million objects: garbage collection does not traverse them, neither meanwhile nor later.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(50_000)  # a composed configuration has thousands of objects
    gc.enable()


def pytest_sessionfinish() -> None:
    """Lets what is imported be collected: extension modules report leaks otherwise."""
    gc.unfreeze()
