"""How rows are dealt to optimizer steps and ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("verl")

from hypothesis import given, settings
from hypothesis import strategies as st
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from verl_atgrpo.train.trainer.update_inputs import deal


def rows_of(*sizes: int, padding: int = 0, prompt: int = 10, seed: int = 0) -> list[dict[str, Any]]:
    """Tags of decisions with so many candidates each, and of padding."""
    rng = random.Random(seed)
    rows = []
    for number, size in enumerate(sizes):
        place = {
            "episode": f"e{number // 2}",
            "agent": "ab"[number % 2],
            "turn": 0,
            "scope": "",
            "prompt_len": prompt + number,
        }
        rows += [{**place, "seq_len": place["prompt_len"] + rng.randrange(1, 30)} for _ in range(size)]
    pad = {"episode": "e0", "agent": "a", "turn": 0, "scope": "", "is_padding": True, "prompt_len": 7, "seq_len": 8}
    return rows + [dict(pad) for _ in range(padding)]


def decision(tags: dict[str, Any]) -> Any:
    return tags["episode"], tags["agent"], tags["turn"]


def cells(rows: list[dict[str, Any]], order: list[int], ranks: int, steps: int) -> list[list[list[int]]]:
    """Row numbers by step and rank, as verl's workers cut them."""
    per_rank = len(rows) // ranks
    size = per_rank // steps
    return [
        [order[rank * per_rank + step * size : rank * per_rank + (step + 1) * size] for rank in range(ranks)]
        for step in range(steps)
    ]


def test_decisions_of_different_scopes_are_different_ones() -> None:
    """Their prompts differ: in a tree of continuations, and where scores make decisions."""
    rows = [{**row, "scope": scope} for scope in ("", "a.0=1.0/") for row in rows_of(4)]
    order, _ = deal(rows, 2, 1, 0, True)
    assert {rows[row]["scope"] for row in order[:4]} in ({""}, {"a.0=1.0/"})
    assert {rows[row]["scope"] for row in order[4:]} != {rows[row]["scope"] for row in order[:4]}


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[dict[str, Any]], int, int]:
    ranks, steps = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=20))
    padding = -sum(sizes) % (ranks * steps) + ranks * steps * draw(st.integers(0, 1))
    return rows_of(*sizes, padding=padding), ranks, steps


@settings(max_examples=200)
@given(batches(), st.integers(0, 99), st.booleans())
def test_every_row_is_dealt_once_and_padding_evenly(
    batch: tuple[list[dict[str, Any]], int, int], seed: int, shared: bool
) -> None:
    rows, ranks, steps = batch
    order = deal(rows, ranks, steps, seed, shared)[0]
    assert sorted(order) == list(range(len(rows)))
    pads = [
        [sum("is_padding" in rows[row] for row in cell) for cell in step] for step in cells(rows, order, ranks, steps)
    ]
    assert max(map(sum, pads)) - min(map(sum, pads)) <= 1
    assert all(max(step) - min(step) <= 1 for step in pads)
    # Between two steps at most one decision is parted.
    where: dict[Any, set[int]] = {}
    for step, mine in enumerate(cells(rows, order, ranks, steps)):
        for row in (row for cell in mine for row in cell if "is_padding" not in rows[row]):
            where.setdefault(decision(rows[row]), set()).add(step)
    assert sum(len(found) - 1 for found in where.values()) <= steps - 1
    assert order == deal(rows, ranks, steps, seed, shared)[0]


@pytest.mark.parametrize("shared", [False, True])
def test_the_rows_of_a_step_do_not_depend_on_ranks_or_trees(shared: bool) -> None:
    rows = rows_of(*[8] * 32)
    steps = [
        [{row for cell in step for row in cell} for step in cells(rows, deal(rows, ranks, 4, 3, trees)[0], ranks, 4)]
        for ranks, trees in [(1, False), (4, shared)]
    ]
    assert steps[0] == steps[1]


def test_candidates_stay_together_where_they_fit() -> None:
    rows = rows_of(*[8] * 32)
    for step in cells(rows, deal(rows, 4, 4, 0, shared=True)[0], 4, 4):
        for cell in step:
            assert len({decision(rows[row]) for row in cell}) == 2


def test_a_decision_larger_than_a_ranks_share_is_parted() -> None:
    rows = rows_of(8, 8)
    (step,) = cells(rows, deal(rows, 8, 1, 0, shared=True)[0], 8, 1)
    assert [len({decision(rows[row]) for row in cell}) for cell in step] == [1] * 8


def test_steps_are_shuffled_by_the_seed() -> None:
    rows = rows_of(*[4] * 16)
    orders = [deal(rows, 2, 4, seed, shared=False)[0] for seed in range(3)]
    assert orders[0] != orders[1] != orders[2]
    # Rows come in the order of agents: a step must not be a part of it.
    assert max(orders[0][:8]) > 16


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_have_as_equal_workloads_as_verls(ranks: int) -> None:
    rng = random.Random(ranks)
    rows = [
        {
            "episode": str(row),
            "agent": "a",
            "turn": 0,
            "scope": "",
            "prompt_len": 100,
            "seq_len": 101 + int(rng.expovariate(0.002)),
        }
        for row in range(256)
    ]
    work = [calculate_workload(tags["seq_len"]) for tags in rows]
    verls = get_seqlen_balanced_partitions(work, k_partitions=ranks, equal_size=True)
    (ours,) = cells(rows, deal(rows, ranks, 1, 0, shared=False)[0], ranks, 1)

    def largest(partitions: list[list[int]]) -> float:
        return max(sum(work[row] for row in mine) for mine in partitions) / (sum(work) / ranks)

    assert largest(ours) < largest(verls) + 0.01


def test_shared_prompts_count_once_in_the_balance() -> None:
    # Prompts of 1,000 tokens: one row of 500 more tokens weighs as much as two decisions whose rows share a prompt.
    long = [
        {"episode": "l", "agent": "a", "turn": 0, "scope": "", "prompt_len": 1000, "seq_len": 1000 + extra}
        for extra in (900, 900)
    ]
    short = [
        {"episode": f"s{number}", "agent": "a", "turn": 0, "scope": "", "prompt_len": 1000, "seq_len": 1010}
        for number in range(3)
        for _ in range(2)
    ]
    rows = long + short

    def partner(shared: bool) -> float:
        (step,) = cells(rows, deal(rows, 2, 1, 0, shared)[0], 2, 1)
        (own,) = [cell for cell in step if 0 in cell]
        unique = {decision(rows[row]): rows[row]["prompt_len"] for row in own}
        return sum(rows[row]["seq_len"] - 1000 for row in own) + sum(unique.values())

    assert partner(shared=True) == 2 * 1000 + 2 * 900 + 2 * 10


def test_metrics_are_verls() -> None:
    rows = rows_of(4, 4)
    order, metrics = deal(rows, 2, 1, 0, shared=False)
    sums = [sum(rows[row]["seq_len"] for row in half) for half in (order[:4], order[4:])]
    assert metrics["global_seqlen/balanced_max"] == max(sums)
    assert metrics["global_seqlen/mean"] == sum(sums) / 2


@pytest.mark.parametrize(("rows", "ranks", "steps"), [(7, 2, 1), (8, 2, 3), (6, 4, 1), (10, 2, 4)])
def test_rows_that_do_not_divide_are_refused(rows: int, ranks: int, steps: int) -> None:
    with pytest.raises(ValueError, match=f"{rows} rows .* {ranks} ranks x {steps} mini-batches"):
        deal(rows_of(*[1] * rows), ranks, steps, 0, shared=False)
