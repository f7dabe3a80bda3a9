"""Filter, metrics and update agree on what has a signal, whatever the rewards' size; rows have their weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("verl")

from fakes.local_queue import LocalQueue
from fakes.scripted_policy import Play, bounded

from verl_atgrpo import Outcome, Score, ScriptedTeam, play
from verl_atgrpo.train.estimators.choice import resolve_spec
from verl_atgrpo.train.estimators.presets import PRESETS
from verl_atgrpo.train.rollout.episode_rows import training_rows
from verl_atgrpo.train.rows import batch as batches
from verl_atgrpo.train.rows.batch import Batch
from verl_atgrpo.train.rows.row_advantages import loss_weights, policy_advantages, rows_with_signal
from verl_atgrpo.train.rows.step_rows import StepRows, groups_with_signal
from verl_atgrpo.train.trainer.metrics import AgentProgress, step_metrics
from verl_atgrpo.train.trainer.update_inputs import write_advantages

Tags = dict[str, Any]


NUMBERS = itertools.count()


def row(group: str, reward: float, agent: str = "a", **tags: Any) -> Tags:
    return {
        "policy": "p", "group": group, "agent": agent, "turn": 0, "episode": f"{group}_0", "reward": reward,
        "team_reward": reward, "local_reward": 0.0, "response_len": 2, "seq_len": 3, "truncated": False,
        "episode_success": True, "episode_reward": 1.0, "temperature": 1.0, "candidate": next(NUMBERS), **tags,
    }  # fmt: skip


def written(monkeypatch: pytest.MonkeyPatch, rows: list[Tags], spec: Any, mode: str = "token-mean") -> list[float]:
    """The advantages that the workers get."""
    local = LocalQueue()
    keys = [f"t_{number}_0" for number in range(len(rows))]
    local.kv_batch_put(keys, "train", tags=rows)
    local.fields["train"].update({key: {} for key in keys})
    monkeypatch.setattr(batches.tq, "kv_batch_put", local.kv_batch_put)
    write_advantages(Batch(keys, rows), spec, mode)
    of_rows = [local.fields["train"][key]["advantages"] for key in keys]
    assert all(bool((values == values[0]).all()) for values in of_rows)
    return [float(values[0]) for values in of_rows]


OFFSETS = [0.0, 1e3, 1e6, 1e9, 1e12, -1e6, -1e9]
SPREADS: list[tuple[Sequence[float], bool]] = [
    ((0.0, 0.01, 0.02, 0.03), True),
    ((0.0, 0.0, 0.0, 1.0), True),
    ((0.0, 0.0, 0.0, 0.0), False),
    ((5.0, 5.0, 5.0, 5.0), False),
]


@pytest.mark.parametrize("preset", ["at_grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize(("rewards", "signal"), SPREADS)
@pytest.mark.parametrize("offset", OFFSETS)
def test_an_offset_hides_no_signal_and_makes_none(
    monkeypatch: pytest.MonkeyPatch, offset: float, rewards: Sequence[float], signal: bool, preset: str
) -> None:
    spec = PRESETS[preset]
    rows = [row("g", offset + reward) for reward in rewards]
    assert groups_with_signal(rows, spec) == {("p", "g"): signal}
    has = rows_with_signal(rows, spec)
    assert step_metrics(rows, has)["team/zero_variance_groups"] == float(not signal)
    assert AgentProgress().metrics(rows, has)["agent/a/stuck_groups"] == 0, "the episode is solved"
    advantages = written(monkeypatch, rows, spec)
    assert any(advantages) == signal
    without = policy_advantages([row("g", reward) for reward in rewards], spec).tolist()
    assert advantages == pytest.approx(without, abs=max(1e-5, 1e-14 * abs(offset)))


@pytest.mark.parametrize(("alpha", "local_weight"), [(1e6, 1.0), (1e9, 1.0), (-1e9, 0.1), (1.0, 1e-6), (1e4, 1e-4)])
@pytest.mark.parametrize("team", [1.0, 3.0])
def test_a_large_team_part_hides_no_local_one(
    monkeypatch: pytest.MonkeyPatch, alpha: float, local_weight: float, team: float
) -> None:
    mixed = [Score(team, local).mixed(alpha, local_weight) for local in (0.0, 0.5, 0.5, 1.0)]
    advantages = written(monkeypatch, [row("g", reward) for reward in mixed], PRESETS["rloo"])
    assert advantages == pytest.approx([local_weight * x for x in (-2 / 3, 0, 0, 2 / 3)], abs=1e-3 * local_weight)


@pytest.mark.parametrize(
    "rewards",
    [
        (0.1 + 0.2, 0.3),
        (0.1 * 3, 0.3, 0.1 + 0.1 + 0.1),
        (0.7 + 0.2 - 0.9, 0.0),
        (sum([0.1] * 10), 1.0),
        (1e6 + 0.1 + 0.2, 1e6 + 0.3),
        ((0.1 + 0.7) * 1e9, 0.8 * 1e9),
        (1 / 3 + 1 / 3 + 1 / 3, 1.0),
        (-(0.1 + 0.2), -0.3),
    ],
)
@pytest.mark.parametrize("preset", ["at_grpo", "dr_grpo", "rloo"])
def test_sums_of_the_same_parts_are_equal_in_any_order(rewards: Sequence[float], preset: str) -> None:
    spec = PRESETS[preset]
    for order in itertools.permutations(rewards):
        rows = [row("g", reward) for reward in order]
        assert rows_with_signal(rows, spec) == [False] * len(rows)
    assert step_metrics(rows, [False] * len(rows))["agent/a/inflation_factor"] == 1


def test_an_advantage_beyond_float32_is_refused() -> None:
    with pytest.raises(ValueError, match=r"group 'g': the reward .* more than float32 holds; scale the rewards down"):
        policy_advantages([row("g", 0.0), row("g", 1e40)], PRESETS["dr_grpo"])
    assert policy_advantages([row("g", 0.0), row("g", 1e40)], PRESETS["at_grpo"]).tolist() == pytest.approx(
        [-(0.5**0.5), 0.5**0.5]
    )


# ------------------------------------------------------------------ equal rewards with a signal, and the reverse


def gigpo(*lengths: int, reward: float = 1.0) -> list[Tags]:
    """Rows of a task's episodes with one reward, of these numbers of decisions; all prompts are the same."""
    return [
        row("t", reward, episode=f"t_{number}", left=left, anchor="x")
        for number, length in enumerate(lengths)
        for left in reversed(range(length))
    ]


def dr_mas(**rewards: Sequence[float]) -> list[Tags]:
    return [row("t", reward, agent) for agent, own in rewards.items() for reward in own]


@pytest.mark.parametrize(
    ("preset", "rows", "agents"),
    [
        ("gigpo", gigpo(1, 1), {"a": 1.0}),
        ("gigpo", gigpo(1, 2), {"a": 0.0}),
        ("gigpo", gigpo(3), {"a": 0.0}),
        ("gigpo", gigpo(1, 2, reward=0.0), {"a": 1.0}),
        ("mas_grpo", gigpo(1, 2), {"a": 1.0}),
        ("dr_mas", dr_mas(a=[0, 0], b=[1, 1]), {"a": 1.0, "b": 1.0}),
        ("dr_mas", dr_mas(a=[0, 1], b=[1, 1]), {"a": 0.0, "b": 1.0}),
        ("dr_mas", dr_mas(a=[1], b=[0]), {"a": 1.0, "b": 1.0}),
        ({"preset": "dr_mas", "center_scope": "group"}, dr_mas(a=[0, 0], b=[1, 1]), {"a": 0.0, "b": 0.0}),
        ({"preset": "at_grpo", "center": "none", "scale": "none"}, dr_mas(a=[1, 1]), {"a": 0.0}),
        ({"preset": "at_grpo", "agents": {"b": {"center": "none", "scale": "none"}}}, dr_mas(a=[1, 1], b=[1, 1]),
         {"a": 1.0, "b": 0.0}),
    ],
    ids=str,
)  # fmt: skip
def test_what_has_a_signal_is_what_has_an_advantage(
    monkeypatch: pytest.MonkeyPatch, preset: Any, rows: list[Tags], agents: dict[str, float]
) -> None:
    """`agents`: the share of an agent's groups without a signal."""
    spec = resolve_spec(preset)
    metrics = step_metrics(rows, rows_with_signal(rows, spec))
    assert {agent: metrics[f"agent/{agent}/zero_variance_groups"] for agent in agents} == agents
    (kept,) = groups_with_signal(rows, spec).values()
    assert metrics["team/zero_variance_groups"] == float(not kept) == float(all(agents.values()))
    assert any(written(monkeypatch, rows, spec)) == kept


def test_what_is_not_trained_is_in_no_share() -> None:
    rows = [
        *(row("g", reward, policy="frozen", agent="judge") for reward in (1.0, 1.0)),
        *(row("h", reward) for reward in (0.0, 1.0)),
        *(row("i", reward) for reward in (1.0, 1.0)),
    ]
    signal = rows_with_signal(rows, PRESETS["at_grpo"], {"p"})
    assert signal == [None, None, True, True, False, False]
    metrics = step_metrics(rows, signal)
    assert metrics["team/zero_variance_groups"] == metrics["agent/a/zero_variance_groups"] == 0.5
    progress = AgentProgress().metrics(rows, signal)
    assert not {"agent/judge/zero_variance_groups", "agent/judge/stuck_groups"} & {*metrics, *progress}
    assert metrics["agent/judge/reward"] == 1


# ------------------------------------------------------------------ weights and denominators


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("weights", [[1.0] * 4, [0.25] * 4, [1.0, 0.5, 0.25, 0.125], [1 / 3, 1.0, 1.0, 1 / 9]])
def test_weights_are_a_mean_of_one_over_what_verl_divides_by(weights: list[float], mode: str) -> None:
    tokens = torch.tensor([1, 5, 2, 40])
    found = loss_weights(torch.tensor(weights, dtype=torch.float64), tokens, mode)
    counted = tokens if mode == "token-mean" else torch.ones(4)
    assert ((found * counted).sum() / counted.sum()).item() == pytest.approx(1)
    assert (found / found[0]).tolist() == pytest.approx([weight / weights[0] for weight in weights])
    assert (found == 1).all() or len(set(weights)) > 1


@pytest.mark.parametrize(
    ("lengths", "weights"),
    [
        ((2, 2), (1.0, 1.0)),
        ((50, 2), (1.0, 1.0)),
        ((2, 50), (1.0, 1.0)),
        ((50, 2), (0.5, 0.125)),
        ((7, 7), (0.125, 0.5)),
        ((1, 30), (1 / 3, 1 / 9)),
    ],
)
def test_the_filter_enlarges_an_update_by_the_tokens_that_it_drops(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int], weights: tuple[float, float]
) -> None:
    """Of two groups the first is dropped; `lengths` and `weights` are of their rows."""
    (long, short), (first, second) = lengths, weights
    rows = [
        *(row("flat", 1.0, response_len=long, weight=first) for _ in range(2)),
        *(row("steep", reward, response_len=short, weight=second) for reward in (0.0, 1.0)),
        *(row("other", 1.0, policy="q", response_len=100) for _ in range(2)),
    ]
    spec = PRESETS["at_grpo"]
    sampled = StepRows([str(number) for number in range(len(rows))], rows, groups_with_signal(rows[:4], spec))

    def per_token(kept: list[Tags]) -> float:
        """What the last row's tokens are multiplied by in the loss, by verl's `token-mean`."""
        return written(monkeypatch, kept, spec)[-1] / sum(tags["response_len"] for tags in kept)

    share = sampled.tokens_dropped_share("p")
    factor = per_token(sampled.rows_for({"p"}).tags) / per_token(rows[:4])
    assert factor == pytest.approx(1 / (1 - share), rel=1e-5)
    assert share == pytest.approx(first * long / (first * long + second * short))
    assert sampled.tokens_dropped_share("q") == sampled.tokens_dropped_share("none") == 0


# ------------------------------------------------------------------ decisions in scores


@pytest.mark.parametrize(
    ("drafts", "train", "weights"),
    [(2, False, 1 / 2), (3, False, 1 / 3), (4, True, 1 / 4), (8, False, 1 / 8), (1, False, 1.0)],
)
def test_a_decision_in_a_score_weighs_as_one_however_many_candidates_are_scored(
    drafts: int, train: bool, weights: float
) -> None:
    async def inner(text: str) -> Score:
        async def innermost(vote: str) -> Score:
            await team.left.act("thought", candidates=2)
            return Score()

        await team.right.act("vote", innermost, candidates=2)
        return Score()

    async def workflow(own: Any) -> Outcome:
        await own.left.act("draft", inner, candidates=drafts, train=train)
        return Outcome(True, 1.0)

    team = ScriptedTeam({"left": lambda prompt, index: str(index), "right": lambda prompt, index: str(index)})
    record = bounded(play(Play(workflow), 0, team))
    sums: dict[tuple[str, int], float] = {}
    for tags in (one.tags for one in training_rows("u", 0, record, "tree")):
        depth = tags["scope"].count("/")
        sums[tags["agent"], depth] = sums.get((tags["agent"], depth), 0.0) + tags["weight"]
    assert sums == pytest.approx({("right", 1): 1, ("left", 2): 1, **({("left", 0): 1} if train else {})})
    assert [one.weight for one in record.decisions if one.agent == "right"] == pytest.approx([weights] * drafts)
