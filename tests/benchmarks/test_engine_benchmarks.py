"""The pure functions of the benchmarks, and a step's rows at a small size; measurements are not tested."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_against_grpo
import bench_async
import bench_engine
import bench_policies
import bench_prefill
import bench_step_rows
import bench_team
import profile_step
import pytest
import real_stack
import training_jobs
from processes import children
from real_stack import Request
from waiting import HANG, wait_until

from verl_atgrpo import ScriptedTeam, play
from verl_atgrpo.lab.report.learning_curve import Point
from verl_atgrpo.train.rollout.episode_rows import training_rows


def test_recorded_requests_are_read_back(tmp_path: Path) -> None:
    rollouts = [[Request([5, 6, 7], 3, 0), Request([8], 1, 1)], [Request([9, 9], 16, 0)]]
    real_stack.save(tmp_path / "rollouts", rollouts)
    assert real_stack.load(tmp_path / "rollouts") == rollouts


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("ray::TeamRolloutWorker", "TeamRolloutWorker"),
        ("ray::WorkerDict.actor_rollout_update_actor", "WorkerDict"),
        ("ray::TaskRunnerV1.run", "TaskRunnerV1"),
        ("VLLM::EngineCore", "EngineCore"),
        ("/opt/ray/core/src/ray/raylet/raylet", "Ray itself"),
        ("", "Ray itself"),
    ],
)
def test_processes_are_named_by_their_titles(command: str, name: str) -> None:
    assert real_stack.name_of(command) == name


def test_a_rollout_of_twice_the_replays_time_has_half_its_throughput() -> None:
    assert bench_engine.ratios([2.0, 4.0], [1.0, 5.0]) == [0.5, 1.25]


def test_a_failed_part_ends_the_benchmark_with_its_output(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("print('what went wrong')\nraise SystemExit(3)\n")
    with pytest.raises(SystemExit, match="what went wrong"):
        real_stack.run_part(str(tmp_path / "part.py"))
    (tmp_path / "quiet.py").write_text("print('noise')\nprint('{\"seconds\": [1.5]}')\nprint('noise')\n")
    assert real_stack.run_part(str(tmp_path / "quiet.py")) == {"seconds": [1.5]}


BENCHMARK = """
import sys, processes, real_stack
processes.exit_on_sigterm()
real_stack.run_part(sys.argv[1])
"""
PART = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("how far it came", flush=True)
print(file=open(sys.argv[0] + ".began", "w"))
subprocess.run(["sleep", "infinity"])
"""


@pytest.mark.slow
def test_a_terminated_benchmark_ends_its_part_and_the_parts_processes(tmp_path: Path) -> None:
    part = tmp_path / "part.py"
    part.write_text(PART)
    command = [sys.executable, "-c", BENCHMARK, str(part)]
    with subprocess.Popen(command, env=real_stack.environment(), stdout=subprocess.PIPE) as benchmark:
        try:
            wait_until((tmp_path / "part.py.began").exists, lambda: benchmark.poll() is None)
            (session,) = children(benchmark.pid)
            wait_until(lambda: len(training_jobs.living(session)) == 2)
            benchmark.terminate()
            said, _ = benchmark.communicate(timeout=HANG)
            assert (benchmark.returncode, said.strip()) == (143, b"how far it came")
        finally:
            benchmark.kill()
    wait_until(lambda: not training_jobs.living(session))


def test_a_jobs_processes_are_those_of_its_session_with_a_title() -> None:
    def begun(script: str) -> subprocess.Popen[bytes]:
        command = ["ray::TaskRunnerV1.run", "-c", f"exec 3<&0; {script} read <&3"]
        return subprocess.Popen(command, executable="/bin/bash", stdin=subprocess.PIPE, start_new_session=True)

    titles = "ray::IDLE raylet ray::WorkerDict.update"
    job = begun(f"for title in {titles}; do (exec -a $title bash -c 'read <&3') & done;")
    elsewhere = begun("")
    try:
        wait_until(lambda: sorted(profile_step.processes_of(job).values()) == ["TaskRunnerV1", "WorkerDict"])
    finally:
        for each in (job, elsewhere):
            training_jobs.end(each)


@pytest.mark.parametrize("plain", [False, True])
def test_a_replay_generates_exactly_as_many_tokens(plain: bool) -> None:
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    parameters = bench_engine.replay_parameters(Request([5, 6], 7, 11), sampling, plain)
    assert (parameters["max_tokens"], parameters["ignore_eos"]) == (7, True)
    # As in training unless plain: log-probs of the sampled tokens, a seed for every request.
    assert (parameters.get("seed"), parameters.get("logprobs")) == ((None, None) if plain else (11, 0))
    assert sampling.items() <= parameters.items()


class CachingServer:
    """Caches prompts in blocks of 32 as soon as the first request has started."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, ...]] = set()
        self.in_flight: dict[str, int] = {}
        self.most: dict[str, list[int]] = {}
        self.seeds: list[int] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        assert bench_prefill.SHORTEST <= len(prompt_ids) <= bench_prefill.LONGEST
        prompt = tuple(prompt_ids)
        cached = (len(prompt) - 1) // 32 * 32 if prompt in self.seen else 0
        self.seen.add(prompt)
        self.seeds.append(sampling_params["seed"])
        self.in_flight[request_id] = self.in_flight.get(request_id, 0) + 1
        self.most.setdefault(request_id, []).append(self.in_flight[request_id])
        await asyncio.sleep(0)
        self.in_flight[request_id] -= 1
        return SimpleNamespace(extra_fields={"num_cached_tokens": cached})


@pytest.mark.parametrize("order", bench_prefill.ORDERS)
def test_the_share_of_cached_tokens(order: str) -> None:
    server, asked = CachingServer(), bench_prefill.prompts(3, 106, order)
    made = asyncio.run(bench_prefill.sample(server, asked, 8, order))
    lengths = [len(prompt) for prompt in asked]
    expected = sum(7 * ((length - 1) // 32 * 32) for length in lengths) / (8 * sum(lengths))
    assert made.share == pytest.approx(expected)
    assert made.of_possible == pytest.approx(expected / (7 / 8))
    assert len(set(server.seeds)) == 24
    # Siblings in flight together: all eight, or the seven that follow the one sent ahead.
    assert {max(counts) for counts in server.most.values()} == {7 if order == "lead" else 8}


def test_replayed_decisions_are_no_work() -> None:
    """Four decisions; after a candidate of each there are three, two, one and none to be sampled."""
    environment = bench_team.Turns(2)
    assert asyncio.run(bench_team.branched_step(environment, 1, 2, "every")) == (4 + 3 + 2 + 1, 8)
    assert asyncio.run(bench_team.branched_step(environment, 1, 3, "first")) == (4 + 2 * 3, 3)
    assert asyncio.run(bench_team.step(environment, 1, 2)) == (4, 8)


def test_one_candidate_has_nothing_to_share() -> None:
    made = asyncio.run(bench_prefill.sample(CachingServer(), bench_prefill.prompts(3, 106, "s"), 1, "at once"))
    assert (made.share, made.of_possible) == (0.0, 1.0)


def test_the_time_saved_is_relative_to_the_same_requests_without_a_cache() -> None:
    def draws(seconds: float) -> list[bench_prefill.Sampled]:
        return [bench_prefill.Sampled(8, order, 600, 800, seconds + place) for place, order in enumerate(("a", "b"))]

    lines = bench_prefill.table({"block 32": draws(2.0), "no cache": draws(6.0)}).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["3.00", "2.33", "1.00", "1.00"]
    assert [line.split()[4:6] for line in lines[1:2]] == [["0.750", "0.857"]]


def step(cycle: float, whole: float, gen: float, **stages: float) -> dict[str, float]:
    timers = {**dict.fromkeys(bench_against_grpo.STAGES, 0.0), "step": whole, "gen": gen, **stages}
    return bench_against_grpo.stages_of(cycle, {f"timing_s/{name}": value for name, value in timers.items()})


def test_a_step_is_split_into_stages_without_remainder() -> None:
    ours = [step(10.0, 9.0, 3.0, update_actor=4.0, adv=0.5), step(11.0, 10.0, 4.0, update_actor=4.0, adv=0.5)]
    stock = [step(8.0, 7.5, 3.0, update_actor=4.0, adv=0.25)]
    sides = bench_against_grpo.medians(ours), bench_against_grpo.medians(stock)
    assert [found["outside rollout"] for found in sides] == [7.0, 5.0]
    assert [found["rest of the step"] for found in sides] == [1.5, 0.25]
    assert [found["after the step"] for found in sides] == [1.0, 0.5]
    for found in sides:
        parts = [seconds for stage, seconds in found.items() if stage not in ("outside rollout", "rollout")]
        assert sum(parts) == pytest.approx(found["outside rollout"])


def test_unequal_steps_are_detected() -> None:
    record = {"perf/total_num_tokens": 100.0, "prompt_length/mean": 40.0, "response_length/mean": 60.0}
    assert len(bench_against_grpo.shapes([record, dict(record)])) == 1
    assert len(bench_against_grpo.shapes([record, {**record, "response_length/mean": 59.0}])) == 2


def test_a_comparison_ends_with_the_first_run_with_different_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    def run(side: str, *_: object) -> tuple[list[dict[str, float]], set[tuple[float, ...]]]:
        runs.append(side)
        return [step(10.0, 9.0, 3.0)], {(1000.0, 40.0, 60.0 if side == "ours" else 59.0)}

    monkeypatch.setattr(bench_against_grpo, "run", run)
    monkeypatch.setattr(bench_against_grpo, "write_prompts", lambda path, letters: None)
    monkeypatch.setattr(bench_against_grpo, "exit_on_sigterm", lambda: None)
    monkeypatch.setattr(sys, "argv", ["bench_against_grpo.py", "--model", "nowhere"])
    with pytest.raises(SystemExit, match="equal rows"):
        bench_against_grpo.main()
    assert runs == ["ours", "stock"]


@pytest.mark.parametrize(
    ("options", "tokens", "memory", "status"),
    [
        ([], 1009.0, 9.0, 0),
        ([], 1011.0, 1.0, None),
        (["--adapters", "4", "--limit", "1.15"], 1000.0, 1.14, 0),
        (["--adapters", "4", "--limit", "1.15"], 1000.0, 1.16, 1),  # memory counts as time does
        (["--pool", "8", "--limit", "1.15"], 1000.0, 1.16, 1),
    ],
)
def test_policies_are_compared_at_equal_tokens(
    options: list[str], tokens: float, memory: float, status: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(recipe: str, folder: Path, *_: object) -> tuple[list[dict[str, float]], float]:
        second = folder.name == "second"
        tokens_of_run = {"rollout/tokens": tokens if second else 1000.0}
        times = {f"timing_s/{stage}": 2.0 for stage in bench_policies.STAGES}
        return [{**tokens_of_run, **times}], memory if second else 1.0

    monkeypatch.setattr(bench_policies, "run", run)
    monkeypatch.setattr(bench_policies, "exit_on_sigterm", lambda: None)
    monkeypatch.setattr(sys, "argv", ["bench_policies.py", "--model", "nowhere", *options])
    if status is None:
        with pytest.raises(SystemExit, match="equally many tokens"):
            bench_policies.main()
    else:
        assert bench_policies.main() == status


def test_our_side_has_a_group_of_k_rows_per_task_and_the_rewards_of_the_stock_side() -> None:
    environment = bench_against_grpo.Letters(letters=40)
    team = ScriptedTeam({"first": lambda prompt, index: "U" * (index + 1)}, candidates=8)
    record = asyncio.run(play(environment, environment.task("train", 3), team))
    rows = list(training_rows("t", 0, record, "tree"))
    assert len({row.group for row in rows}) == 1
    assert [row.reward for row in rows] == [
        bench_against_grpo.compute_score("letters", "U" * (index + 1), "U") for index in range(8)
    ]
    assert rows[0].prompt_ids == [ord(char) for char in bench_against_grpo.prompt(3, 40)]


def test_samples_count_for_the_innermost_frame_in_the_packages() -> None:
    driver = "main (verl/trainer/main_ppo.py);fit (verl/trainer/ppo/v1/trainer_base.py)"
    folded = [
        f"{driver};sample (verl/trainer/ppo/v1/replay_buffer.py);sleep (time.py) 30",
        f"{driver};train (verl_atgrpo/train/trainer/policy_unit.py);to (torch/_tensor.py:12);"
        "cat (torch/functional.py) 20",
        f"{driver};train (verl_atgrpo/train/trainer/policy_unit.py) 5",
        "_bootstrap (threading.py);poll (selectors.py) 4",
        "process 1:VLLM::EngineCore;step (vllm/v1/engine/core.py) 3",
        "<native> 1",
        "",
    ]
    found = profile_step.costs(folded)
    assert found == {
        "verl/trainer/ppo/v1/replay_buffer.py:sample": 30,
        "verl_atgrpo/train/trainer/policy_unit.py:train": 25,
        "selectors.py:poll": 4,
        "vllm/v1/engine/core.py:step": 3,
        "?": 1,
    }
    # 63 samples at 50 a second in 2 steps.
    first, second = profile_step.table(found, 50, 2, top=2).splitlines()
    assert first.split() == ["0.300", "s", "47.6%", "verl/trainer/ppo/v1/replay_buffer.py:sample"]
    assert second.split()[0] == "0.250"


def test_without_py_spy_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile_step.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["profile_step.py", "--model", "nowhere"])
    assert profile_step.main() == 1
    assert "pip install 'py-spy" in capsys.readouterr().err


def test_the_target_is_reached_between_two_validations() -> None:
    points = [Point(0, 0.0, 0.0, 0.4), Point(3, 30.0, 6_000.0, 0.8), Point(6, 50.0, 10_000.0, 1.0)]
    assert bench_async.crossing(points, 0.9) == (pytest.approx(40.0), pytest.approx(8_000.0))
    assert bench_async.crossing(points[:2], 0.9) == (math.inf, math.inf)
    assert bench_async.crossing([points[-1], points[-1]], 0.5) == (points[-1].seconds, points[-1].tokens)


def test_a_training_without_an_initial_validation_uses_the_given_one(tmp_path: Path) -> None:
    steps = [
        {"timing_s/step": 20.0, "rollout/tokens": 4_000.0, "team/staleness_mean": 0.0, "team/staleness_max": 0.0},
        {"timing_s/step": 10.0, "rollout/tokens": 2_000.0, "team/staleness_mean": 0.5, "team/staleness_max": 2.0},
    ]
    steps[1]["val-core/plan_path/acc/mean@1"] = 0.9
    lines = [json.dumps({"step": number, "data": data}) for number, data in enumerate(steps, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    one = bench_async.result(tmp_path / "metrics.jsonl", Point(0, 0.0, 0.0, 0.5))
    assert (one.seconds, one.tokens) == (pytest.approx(30.0), pytest.approx(6_000.0))
    assert (one.seconds_per_step, one.staleness, one.oldest) == (10.0, 0.25, 2.0)


def test_a_step_goes_through_all_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verl")
    from verl_atgrpo.train.rows import batch as batches

    monkeypatch.setattr(batches, "tq", batches.tq)  # restored after the test
    queue = str(tmp_path / "queue")
    played = bench_step_rows.work(128, 16.0, True, queue)
    driven = bench_step_rows.drive(queue, answer_tokens=0)
    assert played["rows"] == driven["rows"] == 128
    stages = ["sort", "filter", "split", "mini-batches", "log-probs", "advantage", "metrics"]
    assert [name for name in driven if name not in ("rows", "megabytes")] == stages
    assert bench_step_rows.total(driven) == pytest.approx(sum(driven[stage] for stage in stages))
