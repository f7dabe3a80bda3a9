"""verl's rollout trace for teams: one trace a decision, with its candidates."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from fakes.jobs import asked
from verl.utils.rollout_trace import RolloutTraceConfig, rollout_trace_op

from verl_atgrpo import Score
from verl_atgrpo.play.scripted import ScriptedPolicy
from verl_atgrpo.play.types import TeamOptions
from verl_atgrpo.train.config.job_rules import of_traces
from verl_atgrpo.train.config.run_check import check_run
from verl_atgrpo.train.config.schema import ConfigError
from verl_atgrpo.train.config.section import parse_section
from verl_atgrpo.train.rollout.trace import TraceBudget, TracedTeam
from verl_atgrpo.train.serving.client import TeamClient


class Served(ScriptedPolicy):
    """A script whose requests verl traces, as it does those to its servers."""

    @rollout_trace_op
    async def generate(self, decision_id: str, prompt_ids: list[int], seed: int | None) -> Any:
        await asyncio.sleep(0)
        return await super().generate(decision_id, prompt_ids, seed)


def play(traced: bool = True, task: int = 17) -> None:
    samplers = {"left": Served(lambda prompt, k: "abcd"[k]), "right": Served(lambda prompt, k: "xyzw"[k])}
    team = TracedTeam(
        samplers,
        TeamOptions(candidates=3),
        policies={"left": "one", "right": "two"},
        attributes={"sample_index": task, "step": 5, "rollout_n": 1, "validate": False, "trace": traced},
    )

    async def episode() -> None:
        await asyncio.gather(
            team.left.act("to the left", score=lambda text: Score(local=float(text == "b"))),
            team.right.act("to the right"),
        )
        assert (await team.left.act("again")).text == "a"

    asyncio.run(episode())


@pytest.fixture
def fake_trackio(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """verl's trace with a backend that keeps what it gets."""
    import sys

    logged: list[dict[str, Any]] = []
    trackio: Any = ModuleType("trackio")
    trackio.Trace = lambda messages, metadata: {"messages": messages, **metadata}
    trackio.log = lambda data, step: logged.extend({"name": name, "at": step, **one} for name, one in data.items())
    trackio.init = lambda **kwargs: None
    trackio.context_vars = SimpleNamespace(current_run=SimpleNamespace(get=lambda: None))
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    RolloutTraceConfig.reset()
    RolloutTraceConfig.init("project", "experiment", "trackio")
    yield logged
    RolloutTraceConfig.reset()


def test_every_decision_is_a_trace(fake_trackio: list[dict[str, Any]]) -> None:
    play()
    decisions = [one for one in fake_trackio if one["op"] == "TracedDecision.decide"]
    assert [(one["inputs"]["agent"], one["inputs"]["turn"], one["inputs"]["policy"]) for one in decisions] == [
        ("left", 0, "one"),
        ("right", 0, "two"),
        ("left", 1, "one"),
    ]
    for one in decisions:
        assert (one["step"], one["sample_index"], one["rollout_n"], one["validate"]) == (5, 17, 1, False)
        assert (one["at"], one["experiment_name"], one["status"]) == (5, "experiment", "success")
    first = decisions[0]
    assert first["messages"] == [{"role": "user", "content": "to the left"}, {"role": "assistant", "content": "b"}]
    assert first["output"]["committed"] == 1
    assert [(one["text"], one["local"], one["reward"]) for one in first["output"]["candidates"]] == [
        ("a", 0.0, 0.0),
        ("b", 1.0, 1.0),
        ("c", 0.0, 0.0),
    ]
    requests = [one for one in fake_trackio if one["op"] == "Served.generate"]
    assert len(requests) == 9
    assert {one["sample_index"] for one in requests} == {17}


def test_an_episode_that_is_not_traced_leaves_nothing(fake_trackio: list[dict[str, Any]]) -> None:
    play(traced=False)
    assert fake_trackio == []


def test_without_a_backend_there_is_no_trace() -> None:
    RolloutTraceConfig.reset()
    play()


def test_mlflow_gets_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)  # where it leaves its artefacts
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/traces.db")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    with _mlflow():
        play()
        mlflow.flush_trace_async_logging()
        experiment = mlflow.get_experiment_by_name("project").experiment_id
        traces = mlflow.search_traces(locations=[experiment], return_type="list")
    assert sorted(trace.data.spans[0].name for trace in traces) == ["left.turn_0", "left.turn_1", "right.turn_0"]
    for trace in traces:
        assert {name: trace.info.tags[name] for name in ("step", "sample_index", "rollout_n", "validate")} == {
            "step": "5",
            "sample_index": "17",
            "rollout_n": "1",
            "validate": "False",
        }
        names = [span.name for span in trace.data.spans]
        assert names[1:] == ["TracedDecision.decide"] + ["Served.generate"] * 3
        decide = trace.data.spans[1]
        assert decide.inputs["agent"] == trace.data.spans[0].name.split(".")[0]
        assert len(decide.outputs["candidates"]) == 3


@contextmanager
def _mlflow() -> Iterator[None]:
    RolloutTraceConfig.reset()
    RolloutTraceConfig.init("project", "experiment", "mlflow")
    try:
        yield
    finally:
        RolloutTraceConfig.reset()


def test_as_many_tasks_of_a_step_as_allowed() -> None:
    budget = TraceBudget(2)
    asked = [(1, False), (1, False), (1, True), (1, False), (1, True), (1, True), (2, False), (2, False), (2, False)]
    assert [budget.take(*one) for one in asked] == [True, True, True, False, True, False, True, True, False]
    assert not TraceBudget(0).take(1, False)
    assert all(TraceBudget(None).take(1, False) for _ in range(5))


def test_verl_may_leave_its_tokenizer_with_the_clients() -> None:
    client = TeamClient({})
    client.tokenizer = "what trace.token2text decodes with"


@pytest.mark.parametrize(
    ("trace", "problem"),
    [
        ({"backend": "print"}, r"trace\.backend=print: use one of mlflow, weave, trackio, or null"),
        ({"backend": "weave"}, r"trace\.backend=weave: it is not installed, pip install weave"),
        ({"backend": None, "token2text": True}, r"trace\.token2text=True has no effect without .*trace\.backend"),
        ({"backend": None, "max_samples_per_step_per_worker": 2}, r"trace\.max_samples_per_step_per_worker=2 has no"),
    ],
)
def test_traces_that_cannot_work_are_refused(trace: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings = parse_section({"environment": {"name": "plan_path"}})
        asked(of_traces, settings, actor_rollout_ref={"rollout": {"trace": trace}})


def test_the_run_check_checks_the_trace(compose: Any) -> None:
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.trace\.backend=print"):
        check_run(compose("plan_path_cpu", "actor_rollout_ref.rollout.trace.backend=print"))


def test_a_policy_has_no_trace_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"at_grpo\.policies\.one\.rollout\.trace: .* set actor_rollout_ref"):
        parse_section(
            {"environment": {"name": "plan_path"}, "policies": {"one": {"rollout": {"trace": {"backend": "mlflow"}}}}}
        )
