"""gpu_check.py: what is run when, the arithmetic, the table; and its reduced form on the CPU."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_against_grpo
import bench_engine
import bench_prefix_tree
import gpu_check
import pytest
import real_stack
import training_jobs
from one_gpu import jobs, measures, models, parts
from one_gpu.jobs import Part, choose, duration, startable
from one_gpu.measures import Measure, Report, Rows, Shape
from one_gpu.parts import REDUCED, Setting, against_grpo, all_parts, in_waves, reduced_parts, rollout, walk
from one_gpu.results import Check, Result, baseline_path, last_lines, table, worse
from processes import running as running_processes
from real_stack import Request
from waiting import wait_until

from verl_atgrpo import ScriptedTeam, cli, play
from verl_atgrpo.lab.evaluation import command as eval_command
from verl_atgrpo.lab.evaluation import results

SHORT = Part("short", "", 100, 30)
LONG = Part("long", "", 300, 30)
BIG = Part("big", "", 200, 60)
TIMED = Part("timed", "", 50, 70, alone=True)


# ------------------------------------------------------------ what is run


@pytest.mark.parametrize(
    ("waiting", "running", "gigabytes", "beside", "started"),
    [
        ([SHORT, BIG, LONG], [], 80, 3, [LONG, SHORT]),  # the longest first; the big one does not fit beside it
        ([SHORT, BIG, LONG], [], 100, 2, [LONG, BIG]),
        ([SHORT, LONG], [], 80, 1, [LONG]),
        ([LONG], [SHORT, BIG], 200, 2, []),
        ([SHORT, TIMED, LONG], [], 80, 3, [LONG, SHORT]),  # before those that run alone
        ([TIMED, SHORT], [LONG], 80, 3, [SHORT]),
        ([TIMED], [], 80, 3, [TIMED]),
        ([TIMED], [SHORT], 200, 3, []),
        ([SHORT], [TIMED], 200, 3, []),
    ],
)
def test_parts_start_where_there_is_room(
    waiting: list[Part], running: list[Part], gigabytes: float, beside: int, started: list[Part]
) -> None:
    assert startable(waiting, running, gigabytes, beside) == started


@pytest.mark.parametrize(
    ("parts", "gigabytes", "beside", "seconds"),
    [
        ([SHORT, LONG], 80, 2, 300),
        ([SHORT, LONG], 80, 1, 400),
        ([SHORT, LONG], 50, 2, 400),
        ([SHORT, LONG, BIG], 90, 2, 300),  # 0 to 100 and 300, then beside the long one to 300
        ([SHORT, TIMED, LONG], 80, 2, 350),
        ([], 80, 2, 0),
    ],
)
def test_the_expected_duration_is_that_of_the_schedule(
    parts: list[Part], gigabytes: float, beside: int, seconds: float
) -> None:
    assert duration(parts, gigabytes, beside) == seconds


def test_parts_are_chosen_by_priority_within_time_and_memory() -> None:
    chosen, left = choose([LONG, BIG, SHORT, TIMED], seconds=400, gigabytes=65, beside=2)
    assert chosen == [LONG, SHORT]  # the big one would end after 500 s, the short one runs beside the long one
    assert left == {"big": "no time for its 200 s", "timed": "needs 70 GB of device memory, there are 65"}


def test_twenty_minutes_on_a_card_of_80_gb_have_room_for_what_matters_most() -> None:
    chosen, left = choose([part for part, _ in all_parts(None)], 20 * 60, 79.1, beside=2)
    assert [part.name for part in chosen] == ["numbers", "walk", "step_1p5b", "adapters", "resume", "rollout_1p5b"]
    assert not any("memory" in reason for reason in left.values())
    everything, nothing = choose([part for part, _ in all_parts(None)], 60 * 60, 79.1, beside=2)
    assert len(everything) == len(all_parts(None)) and not nothing


def test_the_reduced_parts_are_the_same_ones() -> None:
    assert {part.name for part, _ in reduced_parts()} == {part.name for part, _ in all_parts(None)}
    assert {part.name for part, _ in reduced_parts()[: len(REDUCED)]} == set(REDUCED)


OKAY = """
import sys; sys.path[:0] = sys.argv[2:]
from pathlib import Path
from one_gpu.measures import Measure, Report
Report(Path(sys.argv[1])).add(Measure("speed", 2.0, target=1.0, better="higher"))
print("went well")
"""
BROKEN = OKAY + "print('what went wrong'); sys.exit(3)"
HANGS = """
import subprocess, sys
child = subprocess.Popen(["sleep", "infinity", ], stdin=subprocess.DEVNULL)
open(sys.argv[1], "w").write("")
child.wait()
"""


def run(tmp_path: Path, scripts: dict[str, str], clock: Any = None) -> dict[str, Result]:
    """Runs scripts as parts; returns their results by name."""
    paths = [str(Path(gpu_check.__file__).parent), str(Path(__file__).parents[1])]

    def command(part: Part) -> list[str]:
        return [sys.executable, "-c", scripts[part.name], str(tmp_path / part.name / jobs.MEASURES), *paths]

    ended: dict[str, Result] = {}
    jobs.run_all(
        [Part(name, f"does {name}", 600, 1) for name in scripts],
        tmp_path,
        command,
        seconds=3600,
        gigabytes=80,
        beside=2,
        tell=lambda text: None,
        ended=lambda result: ended.update({result.name: result}),
        **({} if clock is None else {"clock": clock}),
    )
    return ended


def test_a_part_that_fails_keeps_its_figures_and_ends_no_other(tmp_path: Path) -> None:
    ended = run(tmp_path, {"broken": BROKEN, "okay": OKAY, "silent": "pass"})
    assert {name: result.state for name, result in ended.items()} == {
        "broken": "failed",
        "okay": "done",
        "silent": "failed",  # it measured nothing
    }
    assert "exit status 3" in ended["broken"].reason
    assert ended["broken"].log.splitlines() == ["went well", "what went wrong"]
    assert ended["broken"].measures == ended["okay"].measures == [Measure("speed", 2.0, "", 1.0, "higher")]


@pytest.mark.slow
def test_when_time_is_up_what_runs_is_ended_with_its_processes(tmp_path: Path) -> None:
    marker = tmp_path / "hangs" / jobs.MEASURES

    def clock() -> float:
        return 1e6 if marker.exists() else 0.0

    marker_of_process = f"-c{HANGS}"
    ended = run(tmp_path, {"hangs": HANGS, "hangs_too": HANGS, "late": OKAY}, clock)
    assert ended["hangs"].state == "failed" and "time was up" in ended["hangs"].reason
    assert (ended["late"].state, ended["late"].reason) == ("not run", "time was up")
    assert not running_processes(str(marker)) and not running_processes(marker_of_process)


CRASHES = """
import os, subprocess, sys
subprocess.Popen(["bash", "-c", "sleep infinity; exit", sys.argv[1]], start_new_session=True)
os.kill(os.getpid(), 9)
"""


def test_a_part_that_crashes_leaves_no_job(tmp_path: Path) -> None:
    ended = run(tmp_path, {"crashes": CRASHES})
    assert "exit status -9" in ended["crashes"].reason
    wait_until(lambda: not running_processes(str(tmp_path / "crashes")))


# ------------------------------------------------------------ figures


@pytest.mark.parametrize(
    ("measure", "met"),
    [
        (Measure("a", 1.0), None),
        (Measure("a", 1.0, target=1.0), True),
        (Measure("a", 1.1, target=1.0), False),
        (Measure("a", 1.1, target=1.0, better="higher"), True),
        (Measure("a", 0.9, target=1.0, better="higher"), False),
        (Measure("a", math.nan, target=1.0), False),
        (Measure("a", math.nan, target=1.0, better="higher"), False),
    ],
)
def test_a_target_is_met_or_missed(measure: Measure, met: bool | None) -> None:
    assert measure.met is met


SHAPE = Shape(body=10, head=4, layers=2, width=3, kv_width=1)
ROWS = Rows(decisions=2, candidates=3, prompt=5, answer=2)


def test_the_models_work_is_counted_by_tokens_that_go_through_it() -> None:
    assert ROWS.tokens(trees=True) == 2 * 5 + 6 * 2
    assert ROWS.tokens(trees=False) == 6 * 5 + 6 * 2
    # A prompt's tokens see 1 to 5 tokens, an answer's two 6 and 7.
    assert ROWS.pairs(trees=True) == 2 * 15 + 6 * 13
    assert ROWS.pairs(trees=False) == 6 * 15 + 6 * 13
    # 2 for each weight: 22 tokens through the layers, 12 through the head; 4 for each pair, dimension and layer.
    assert measures.forward_flops(SHAPE, ROWS, trees=True) == 2 * (10 * 22 + 4 * 12) + 4 * 2 * 3 * 108
    assert measures.update_flops(SHAPE, ROWS, trees=False) == 3 * (2 * (10 * 42 + 4 * 12) + 4 * 2 * 3 * 168)


def test_decoding_reads_weights_every_step_and_a_prompt_once_a_decision() -> None:
    # In each of 2 steps the 5 tokens of 2 prompts, and of 6 answers the 1 and 2 tokens so far; 2 numbers x 2 layers.
    assert measures.decoded_bytes(SHAPE, ROWS, steps=7) == 2 * (7 * 14 + 2 * 2 * (2 * 2 * 5 + 6 * 3))


@pytest.mark.parametrize(("chain", "slots", "steps"), [(1, 6, 2), (1, 12, 2), (4, 6, 8), (1, 3, 4), (1, 5, 3)])
def test_decoding_takes_as_many_steps_as_chain_or_slots_need(chain: int, slots: int, steps: int) -> None:
    assert measures.decoding_steps(ROWS, chain, slots) == steps


def test_a_chains_decisions_have_prompts_of_their_own_and_of_one_length() -> None:
    game = bench_against_grpo.Letters(letters=40, decisions=4)
    team = ScriptedTeam({agent: lambda prompt, index: "U" * (index + 1) for agent in game.agents}, candidates=4)
    record = asyncio.run(play(game, game.task("train", 3), team))
    assert [(one.agent, one.turn) for one in record.decisions] == [
        ("first", 0),
        ("second", 0),
        ("first", 1),
        ("second", 1),
    ]
    prompts = {tuple(one.prompt_ids) for one in record.decisions}
    assert len(prompts) == 4 and {len(prompt) for prompt in prompts} == {40}


def test_a_rollouts_requests_are_parted_by_decisions() -> None:
    assert in_waves("aabbccdd", candidates=2, chain=2) == [["a", "a", "c", "c"], ["b", "b", "d", "d"]]


def test_a_rollout_is_compared_with_vllm_alone_wave_by_wave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = 32 * 4 * 4
    offline: list[list[int]] = []

    def run_part(script: str, part: str, *arguments: str) -> dict[str, list[float]]:
        record = Path(next(one for one in arguments if one.startswith("--record=")).removeprefix("--record="))
        if part == "--part=rollout":
            requests = [Request([number // 4] * 544, 256, number) for number in range(asked)]
            real_stack.save(record, [requests] * 3)
            return {"seconds": [8.0, 9.0, 10.0]}
        offline.extend([len(wave), len({one.prompt[0] for one in wave})] for wave in real_stack.load(record))
        return {"seconds": [1.0, 2.0, 2.0, 2.2] * 3}

    monkeypatch.setattr(real_stack, "run_part", run_part)
    config = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2, "vocab_size": 100}))
    monkeypatch.setattr(models, "random_model", lambda *_: tmp_path)
    report = Report(tmp_path / "measures.jsonl")
    rollout(Setting(tmp_path, tmp_path, tmp_path, False, None, measures.Card(989, 4.8), report), "1p5b")
    found = {one.name: one for one in measures.read(tmp_path / "measures.jsonl")}
    assert offline == [[128, 32]] * 12  # candidates stay with their siblings
    assert (found["rollout of 512 requests"].value, found["rollout of 512 requests"].met) == (9.0, False)
    assert found["tokens a second"].value == asked * 256 / 9
    share = found["engine share: vLLM alone over rollout"]
    assert (share.value, share.met) == (pytest.approx(0.8), False)  # 7.2 s over 9 s
    # 1,024 steps of all weights; of each decision 256 times its 544 tokens, of each answer 1 to 256 tokens.
    weights = 2 * (8 * (2 * 8 + 2 * 4) + 3 * 8 * 16) + 800
    kept = 2 * 2 * 4 * (128 * 256 * 544 + asked * 256 * 257 // 2)
    assert found["rollout: memory bandwidth while decoding, at least, of 4.8 TB/s"].value == pytest.approx(
        2 * (1024 * weights + kept) / 9 / 4.8e12
    )


def test_a_step_is_compared_with_that_of_verls_stock_grpo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def of(side: str, options: Any, folder: Path) -> Any:
        slower = 1.0 if side == "ours" else 2.0
        timers = {"step": 9.0, "gen": 5.0, "update_actor": 2.0, "old_log_prob": 0.5, "adv": 0.0, "update_weights": 0.0}
        step = {f"timing_s/{name}": slower * value for name, value in timers.items()}
        return [bench_against_grpo.stages_of(10.0 * slower, step)] * 3, {(109824.0, 602.0, 256.0)}

    monkeypatch.setattr(bench_against_grpo, "run", of)
    monkeypatch.setattr(bench_against_grpo, "write_prompts", lambda *_: None)
    monkeypatch.setattr(models, "random_model", lambda *_: tmp_path)
    monkeypatch.setattr(models, "config_of", lambda *_: None)
    monkeypatch.setattr(Shape, "of", lambda _: Shape(body=10**9, head=10**8, layers=10, width=1000, kv_width=100))
    report = Report(tmp_path / "measures.jsonl")
    against_grpo(Setting(tmp_path, tmp_path, tmp_path, False, None, measures.Card(1000, 4.8), report), "1p5b")
    found = {one.name: one for one in measures.read(tmp_path / "measures.jsonl")}
    outside = found["outside rollout, over that of verl's stock GRPO"]
    assert (outside.value, outside.met) == (0.5, True)
    rows = Rows(decisions=16, candidates=8, prompt=602, answer=256)
    assert found["ours: tokens through the model"].value == rows.tokens(trees=True) == 16 * 602 + 128 * 256
    assert found["stock: tokens through the model"].value == 128 * 858
    shape = Shape.of({})
    update = found["ours: update, of the peak of 1000 TFLOP/s"]
    assert update.value == pytest.approx(measures.update_flops(shape, rows, trees=True) / 2 / 1e15)
    assert update.met is False
    assert found["stock: update, of the peak of 1000 TFLOP/s"].met is None


def test_a_walk_is_measured_by_its_metrics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = {
        step: {
            "timing_s/step": 5.0,
            "timing_s/gen": 2.0,
            "rollout/tokens": 100.0,
            "training/rollout_probs_diff_max": 1e-5 * step,
            "policy/a/update_arrived": 0.5,
        }
        for step in range(1, 21)
    }
    steps[10]["val-core/walk/acc/mean@1"], steps[20]["val-core/walk/acc/mean@1"] = 0.3, 0.9
    monkeypatch.setattr(parts, "train", lambda *_: steps)
    report = Report(tmp_path / "measures.jsonl")
    setting = Setting(tmp_path, tmp_path, tmp_path, False, None, None, report)
    walk(setting, steps=20, wanted={10: 0.25, 20: 0.95}, apart=1e-4, timed=True)
    found = {one.name: (one.value, one.met) for one in measures.read(tmp_path / "measures.jsonl")}
    assert found["success at step 10"] == (0.3, True) and found["success at step 20"] == (0.9, False)
    assert found["server against actor, largest of all steps"] == (pytest.approx(2e-4), False)
    assert found["tokens generated"] == (2000.0, None)
    assert found["part of an update that arrives at the servers"] == (0.5, None)
    assert found["constant cost of a step"] == (3.0, False)


def test_an_evaluation_is_a_command_that_verl_atgrpo_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[Any, Path]] = []

    def evaluated(request: Any, out: Path, **_: object) -> str:
        asked.append((request, out))
        return ""

    def run(arguments: list[str], **_: object) -> SimpleNamespace:
        return SimpleNamespace(returncode=cli.main(arguments[3:]), stdout=b"")

    rows = {number: SimpleNamespace(success=number < 3) for number in range(4)}
    monkeypatch.setattr(eval_command, "evaluate", evaluated)
    monkeypatch.setattr(results, "read", lambda out: SimpleNamespace(rows=rows))
    monkeypatch.setattr(parts.subprocess, "run", run)
    setting = Setting(tmp_path, tmp_path, tmp_path / "start", False, None, None, Report(tmp_path / "measures.jsonl"))
    assert parts.evaluate(setting, "walk_smollm2", tmp_path / "global_step_6", ["precision=fp16"]) == 0.75
    ((request, out),) = asked
    assert (request.config_name, request.checkpoint) == ("walk_smollm2", tmp_path / "global_step_6")
    assert request.overrides == [f"actor_rollout_ref.model.path={tmp_path / 'start'}", "precision=fp16"]
    assert out.parent == tmp_path


@pytest.mark.slow
def test_a_models_shape_is_that_of_its_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(models.random_model(tmp_path / "model", "small"))
    matrices = {name: one.numel() for name, one in model.named_parameters() if one.dim() == 2}
    head = matrices.pop("model.embed_tokens.weight")
    shape = Shape.of(models.config_of(tmp_path / "model"))
    assert (shape.body, shape.head, shape.layers, shape.width, shape.kv_width) == (
        sum(matrices.values()),
        head,
        6,
        256,
        128,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == model.config.vocab_size  # else servers mask what the actor does not
    assert len(tokenizer("URDL").input_ids) == 4


@pytest.mark.parametrize(("size", "parameters"), [("0p5b", 0.5e9), ("1p5b", 1.5e9)])
def test_made_models_have_their_size(size: str, parameters: float) -> None:
    shape = Shape.of(models.SIZES[size])
    assert shape.body + shape.head == pytest.approx(parameters, rel=0.05)


@pytest.mark.parametrize(
    ("name", "teraflops", "terabytes"),
    [
        ("NVIDIA H200", 989, 4.8),
        ("NVIDIA H100 80GB HBM3", 989, 3.35),
        ("NVIDIA H100 PCIe", 756, 2.0),
        ("NVIDIA A100-SXM4-80GB", 312, 2.04),
    ],
)
def test_a_cards_peaks_are_those_of_its_data_sheet(name: str, teraflops: float, terabytes: float) -> None:
    assert measures.card_of(name) == measures.Card(teraflops, terabytes)
    assert measures.card_of("NVIDIA GeForce RTX 4090") is None


def test_the_constant_cost_is_what_is_neither_sampling_nor_the_model() -> None:
    model = {"gen": 2.5, "end_rollout": 0.5, "policies": 2.0, "old_log_prob": 0.5, "update_actor": 1.0, "ref": 0.25}
    stages = {"save_checkpoint": 1.0, "testing": 9.0, "between_steps": 0.25, "update_weights": 0.5, **model}
    step = {"timing_s/step": 6.25, **{f"timing_s/{name}": value for name, value in stages.items()}}
    assert (measures.constant_cost(step), measures.untimed_cost(step)) == (1.75, 0.5)
    del step["timing_s/ref"]
    assert (measures.constant_cost(step), measures.untimed_cost(step)) == (2.0, 0.75)


# ------------------------------------------------------------ the table


def check(*results: Result, card: str = "NVIDIA H200") -> Check:
    """A check with these results."""
    return Check(card, {"commit": "abc1234"}, list(results))


MET = Measure("a step", 2.0, "s", target=3.0, steady=True)
MISSED = Measure("success", 0.2, "", target=0.9, better="higher")
SHARE = Measure("share of the peak", 0.4, "", better="higher", steady=True)


def test_the_table_tells_targets_failures_and_what_was_not_run() -> None:
    text = table(
        check(
            Result("walk", "done", "trains", 10.0, [MET, MISSED]),
            Result("resume", "failed", "resumes", 5.0, [], "exit status 1", "Traceback\nValueError: no"),
            Result("trees", "not run", "times trees", reason="no time for its 150 s"),
        )
    )
    lines = [line.split() for line in text.splitlines()]
    assert ["walk", "a", "step", "2", "s", "<=", "3", "met"] in lines
    assert ["success", "0.2", ">=", "0.9", "MISSED"] in lines
    assert "FAILED: resume (resumes): exit status 1\n    Traceback\n    ValueError: no" in text
    assert "not run: trees (times trees): no time for its 150 s" in text
    assert text.endswith("NVIDIA H200: 1 of 2 targets met; of 3 parts 1 failed, 1 not run")


@pytest.mark.parametrize(
    ("results", "failed"),
    [
        ([Result("a", "done", measures=[MET, SHARE])], False),
        ([Result("a", "done", measures=[MET]), Result("b", "not run")], False),
        ([Result("a", "done", measures=[MET, MISSED])], True),
        ([Result("a", "done", measures=[MET]), Result("b", "failed")], True),
    ],
)
def test_a_missed_target_or_a_failed_part_fails(results: list[Result], failed: bool) -> None:
    assert check(*results).failed is failed


@pytest.mark.parametrize(
    ("measure", "value", "lines"),
    [
        (MET, 2.09, 0),
        (MET, 2.11, 1),
        (MET, 1.0, 0),  # better
        (SHARE, 0.381, 0),
        (SHARE, 0.379, 1),
        (SHARE, math.nan, 1),
        (MISSED, 0.01, 0),  # varies too much
    ],
)
def test_what_is_five_percent_worse_than_the_baseline_is_told(measure: Measure, value: float, lines: int) -> None:
    now = check(Result("walk", "done", measures=[replace(measure, value=value)]))
    before = check(Result("walk", "done", measures=[measure]))
    assert len(worse(now, before)) == lines
    assert table(now, before).count("WORSE: walk, ") == lines


def test_a_figure_that_is_no_longer_measured_is_told_unless_its_part_was_not_run() -> None:
    before = check(Result("walk", "done", measures=[MET, SHARE]))
    assert worse(check(Result("walk", "done", measures=[MET])), before) == [
        "walk, share of the peak: is not measured any more"
    ]
    assert worse(check(Result("walk", "not run")), before) == []


def test_a_check_is_read_back(tmp_path: Path) -> None:
    made = check(
        Result("walk", "done", "trains", 10.5, [MET, replace(SHARE, value=math.nan)]),
        Result("trees", "not run", reason="no time"),
    )
    made.save(tmp_path / "results.json")
    json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)  # no NaN in it
    again = Check.load(tmp_path / "results.json")
    assert again.results[0].measures[0] == MET
    assert math.isnan(again.results[0].measures[1].value)
    assert (again.card, again.about, again.results[1]) == (made.card, made.about, made.results[1])


def test_a_log_ends_without_bars_and_colours(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\n\n\x1b[31mred\x1b[0m\n10%|#   |\r100%|####| done\nlast\n")
    assert last_lines(log, 3).splitlines() == ["red", "100%|####| done", "last"]
    assert last_lines(tmp_path / "none") == ""


# ------------------------------------------------------------ the command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the command without measuring: parts have the figures that are given by name; one of None fails."""
    monkeypatch.setattr(gpu_check, "exit_on_sigterm", lambda: None)
    monkeypatch.setattr(gpu_check, "device", lambda: ("NVIDIA H200", 139.0))
    monkeypatch.setattr(gpu_check.models, "start_model", lambda *_: Path("/nowhere"))
    ran: list[str] = []

    def call(figures: dict[str, float | None], *options: str) -> tuple[int, list[str]]:
        def run_all(parts: list[Part], *_: Any, ended: Any, **__: Any) -> None:
            for part in parts:
                value = figures.get(part.name, 1.0)
                ran.append(part.name)
                one = Measure("a step", math.nan if value is None else value, "s", 3.0, steady=True)
                ended(Result(part.name, "failed" if value is None else "done", measures=[one]))

        ran.clear()
        monkeypatch.setattr(gpu_check.jobs, "run_all", run_all)
        folders = [f"--out={tmp_path / 'out'}", f"--baselines={tmp_path / 'baselines'}"]
        return gpu_check.main([*folders, *options]), list(ran)

    return call


def test_the_status_is_that_of_targets_and_parts(command: Any) -> None:
    assert command({}, "--only=numbers,walk") == (0, ["numbers", "walk"])
    assert command({"walk": 4.0}, "--only=numbers,walk")[0] == 1
    assert command({"walk": None}, "--only=numbers,walk")[0] == 1


def test_an_unknown_part_is_refused(command: Any) -> None:
    with pytest.raises(SystemExit, match="no parts: wlak; there are numbers"):
        command({}, "--only=wlak")


def test_what_has_ended_is_kept_and_what_failed_is_run_again(command: Any) -> None:
    assert command({"walk": None}, "--only=numbers,walk") == (1, ["numbers", "walk"])
    assert command({}, "--only=numbers,walk,fp32", "--continue") == (0, ["walk", "fp32"])
    assert command({}, "--only=numbers") == (0, ["numbers"])


def test_a_run_is_compared_with_the_cards_baseline(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command({}, "--only=numbers,walk", "--save-baseline")
    assert baseline_path(tmp_path / "baselines", "NVIDIA H200").name == "nvidia_h200.json"
    capsys.readouterr()
    assert command({"walk": 1.2}, "--only=numbers,walk")[0] == 0  # told, but no failure
    assert "WORSE: walk, a step: 1.2 s, 20% worse than the baseline's 1" in capsys.readouterr().out


def test_parts_that_do_not_fit_are_told(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, ran = command({}, "--minutes=6")
    assert (status, ran) == (0, ["numbers", "walk"])
    assert (
        "not run: step_1p5b (a step of 1.5B and verl's stock GRPO): no time for its 330 s" in capsys.readouterr().out
    )


def test_each_parts_process_gets_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process finds its function and setting again; the run itself is the next test's."""
    options = gpu_check.parser().parse_args(["--precision=fp16", "--lr=5e-05", f"--out={tmp_path}"])
    made = gpu_check.command_of(Part("walk", "", 1, 1), options)
    again = gpu_check.parser().parse_args(made[2:])
    assert (again.part, again.precision, again.lr, again.reduced) == ("walk", "fp16", 5e-5, False)
    (tmp_path / "walk").mkdir()
    (tmp_path / "setting.json").write_text(json.dumps({"card": "NVIDIA H200", "start": "/models/smollm2"}))
    seen = []
    monkeypatch.setattr(gpu_check, "all_parts", lambda precision: [(Part("walk", "", 1, 1), seen.append)])
    gpu_check.run_part(again)
    (setting,) = seen
    assert (setting.folder, setting.start, setting.lr) == (tmp_path / "walk", Path("/models/smollm2"), 5e-5)
    assert setting.card is not None and setting.card.terabytes == 4.8
    overrides = setting.walk("fp16")
    assert {"hardware=1_gpu", "precision=fp16", "actor_rollout_ref.actor.optim.lr=5e-05"} <= set(overrides)


@pytest.mark.slow
@pytest.mark.parametrize("reduced", [False, True])
def test_every_configuration_passes_the_checks_of_a_jobs_start(
    compose: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reduced: bool
) -> None:
    """No GPU is here to find a key that is none, or a pair of them that a training refuses."""
    from verl_atgrpo.train.config.run_check import check_run

    class Started(Exception): ...

    asked: list[tuple[str, str, tuple[str, ...]]] = []

    def start(recipe: str, folder: Path, model: Path, *overrides: str, **_: str) -> None:
        asked.append((name, recipe, overrides))
        raise Started

    def of_grpo(side: str, options: Any, folder: Path) -> Any:
        asked.append(
            (name, options.recipe, (*bench_against_grpo.overrides_of(side, options, folder), *options.overrides))
        )
        timers = {f"timing_s/{stage}": 1.0 for stage in ("step", "gen", *bench_against_grpo.STAGES)}
        return [bench_against_grpo.stages_of(2.0, timers)], {(1000.0, 603.0, 256.0)}

    def run_part(script: str, *arguments: str) -> None:
        recipe = "plan_path_cpu" if script == bench_engine.__file__ else bench_prefix_tree.RECIPE
        asked.append((name, recipe, tuple(one for one in arguments if not one.startswith("--"))))
        raise Started

    monkeypatch.setattr(training_jobs, "start", start)
    monkeypatch.setattr(bench_against_grpo, "run", of_grpo)
    monkeypatch.setattr(bench_against_grpo, "write_prompts", lambda *_: None)
    monkeypatch.setattr(real_stack, "run_part", run_part)
    small = models.random_model(tmp_path / "model", "small")
    monkeypatch.setattr(models, "random_model", lambda *_: small)
    for part, run in all_parts("fp16"):
        name, folder = part.name, tmp_path / part.name
        folder.mkdir()
        if name != "numbers":  # composes nothing of ours
            report = Report(folder / jobs.MEASURES)
            card = None if reduced else measures.card_of("NVIDIA H200")
            with contextlib.suppress(Started):
                run(Setting(folder, tmp_path, small, reduced, 5e-5, card, report))
    assert {name for name, *_ in asked} == {part.name for part, _ in all_parts(None)} - {"numbers"}
    for name, recipe, overrides in asked:
        try:
            config = compose(recipe, f"actor_rollout_ref.model.path={small}", *overrides)
            check_run(config)
        except Exception as error:
            raise AssertionError(f"{name}: {recipe} {' '.join(overrides)}") from error
        assert config.trainer.device == ("cpu" if reduced else "cuda")
        if reduced:
            continue
        assert config.actor_rollout_ref.rollout.enforce_eager is ("eager" in name)
        if name in ("fp32", "fp16", "bf16"):
            dtypes = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
            assert config.actor_rollout_ref.rollout.dtype == dtypes[name]
            assert config.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype == name


@pytest.mark.slow
@pytest.mark.training
def test_the_reduced_check_passes_on_the_cpu(tmp_path: Path, tied_model: Path) -> None:
    """A training that is killed and resumed, rollouts, and trees and adapters in verl's engines."""
    script = Path(gpu_check.__file__)
    done = subprocess.run(
        [sys.executable, str(script), "--reduced", f"--model={tied_model}", f"--out={tmp_path / 'out'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    said = done.stdout.decode(errors="replace")
    assert done.returncode == 0, said
    found = Check.load(tmp_path / "out/results.json")
    assert {result.name: result.state for result in found.results} == dict.fromkeys(REDUCED, "done")
    assert sum(one.met is True for result in found.results for one in result.measures) >= 10
