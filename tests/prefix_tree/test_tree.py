"""Packed prefix trees against counting by hand: their tokens, what each token sees, where each is predicted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from fakes.packed_trees import Made, rows_of, trees_of
from hypothesis import given
from hypothesis import strategies as st

from verl_atgrpo.train.engine.prefix_tree.tree import Tree, best_cut, cost, cut, sort


@st.composite
def drawn_rows(draw: st.DrawFn) -> Made:
    """Rows of few different tokens: they share prefixes at every depth, repeat, and are prefixes of each other."""
    token = st.integers(0, 2)
    stems = draw(st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=3))
    rows = []
    for _ in range(draw(st.integers(1, 9))):
        ids = draw(st.sampled_from(stems)) + draw(st.lists(token, min_size=1, max_size=4))
        rows.append((ids, draw(st.integers(1, len(ids) - 1))))
    return rows


def ancestors(tree: Tree, token: int) -> list[int]:
    """What `token` sees, from the root on."""
    return [key for key in range(len(tree)) if key <= token < tree.ends[key]]


@given(drawn_rows(), st.integers(1, 40))
def test_each_response_token_is_predicted_from_exactly_what_came_before_it(rows: Made, budget: int) -> None:
    packed = trees_of(rows, budget)
    assert sorted(row for tree in packed for row in tree.rows) == list(range(len(rows)))
    for tree in packed:
        place = 0
        for row, count in zip(tree.rows, tree.counts, strict=True):
            ids, prompt = rows[row]
            assert count == len(ids) - prompt
            for end in range(prompt, len(ids)):
                seen = ancestors(tree, tree.predictors[place])
                assert tree.tokens[seen].tolist() == ids[:end]
                assert tree.depths[seen].tolist() == list(range(end))
                assert tree.labels[place] == ids[end]
                place += 1
        assert place == len(tree.predictors) == len(tree.labels)


@given(drawn_rows(), st.integers(1, 40))
def test_a_tree_has_no_token_twice_and_no_more_than_its_budget(rows: Made, budget: int) -> None:
    for tree in trees_of(rows, budget):
        mine = [rows[row][0][:-1] for row in tree.rows]
        prefixes = {tuple(ids[:end]) for ids in mine for end in range(1, len(ids) + 1)}
        assert len(tree) == len(prefixes)
        assert len(tree) <= budget or len(mine) == 1 or len({tuple(ids) for ids in mine}) == 1


@given(drawn_rows(), st.integers(1, 40), st.data())
def test_as_many_trees_as_another_rank_has(rows: Made, budget: int, data: st.DataObject) -> None:
    least = data.draw(st.integers(1, len(rows)))
    packed = trees_of(rows, budget, least)
    assert len(packed) >= least
    assert len(packed) == max(least, len(trees_of(rows, budget)))
    assert sorted(row for tree in packed for row in tree.rows) == list(range(len(rows)))


def test_siblings_stay_together_whatever_the_order_of_the_rows() -> None:
    prompts = [[1, 2, 3, 4, 5], [1, 2, 9, 9, 9], [7, 7, 7, 7, 7]]
    rows = [([*prompt, answer, 0], 5) for answer, prompt in itertools.product(range(4), prompts)]
    packed = trees_of(rows, 9)
    assert [sorted(row % 3 for row in tree.rows) for tree in packed] == [[0] * 4, [1] * 4, [2] * 4]


def test_the_largest_tree_is_split_where_it_has_half_of_its_tokens() -> None:
    rows = rows_of([([1, 2], 1), ([3] + [4] * 10, 1), ([3] + [5] * 10, 1), ([6, 7], 1)])
    order = sort(rows)
    assert cut(rows, order, 100) == [slice(0, 4)]
    assert cut(rows, order, 100, at_least=2) == [slice(0, 2), slice(2, 4)]
    assert cut(rows, order, 100, at_least=4) == [slice(n, n + 1) for n in range(4)]
    with pytest.raises(ValueError, match="4 rows cannot be 5 trees"):
        cut(rows, order, 100, at_least=5)


def test_attention_to_a_sequence_costs_its_square() -> None:
    assert cost(np.array([100, 300]), square=200.0) == 100 + 50 + 300 + 450
    assert cost(np.array([100, 300]), square=np.inf) == 400


@pytest.mark.parametrize(
    ("square", "best"),
    [
        (np.inf, (4096, 4096.0)),  # the whole tree
        (1e9, (4096, pytest.approx(4096.0, rel=1e-3))),
        # Halves share 512 tokens less: 2 x 2304 (1 + 2304 / 4608).
        (4608.0, (2500, 2 * 2304 * 1.5)),
        (64.0, (625, 8 * 960 * 16.0)),  # every row a tree, as with 1250
    ],
)
def test_the_best_cut_by_hand(square: float, best: tuple[int, float]) -> None:
    # Eight rows of 512 + 448 + 1 tokens; the last is not read.
    rows = rows_of([([0] * 512 + [1 + row] * 449, 512) for row in range(8)])
    most, least = best_cut(rows, sort(rows), 4096 if square > 5000 else 2500, square)
    assert (most, least) == best


@pytest.mark.parametrize("prompt", [0, 3, 4])
def test_a_row_has_a_prompt_and_a_response(prompt: int) -> None:
    with pytest.raises(ValueError, match=f"row 1 has {prompt} prompt tokens of 3"):
        rows_of([([1, 2], 1), ([1, 2, 3], prompt)])


def test_large_token_ids_sort_as_numbers() -> None:
    rows = rows_of([([256, 1], 1), ([255, 1], 1), ([151_000, 1], 1), ([65_536, 1], 1)])
    assert sort(rows).rows.tolist() == [1, 0, 3, 2]
    assert np.array_equal(sort(rows).shared, np.zeros(4))
