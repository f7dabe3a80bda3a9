"""The labels of rows as integers: what `rollout.episode_rows` writes as tags, and the formulas read as tensors."""

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_atgrpo.play.types import part_of
from verl_atgrpo.train.estimators.spec import EstimatorSpec, Need

TAGS: Mapping[Need, tuple[str, str]] = {
    "agent": ("agent", "agents"),
    "trajectory": ("episode", "units"),
    "turn": ("turn", "turns"),
    "left": ("left", "left"),
    "anchor": ("anchor", "anchors"),
    "baseline": ("baseline", "baselines"),
}
"""Label that an estimator needs beside the group -> the row's tag, and its name in `spec.Labels`."""

_NUMBERS: Mapping[Need, torch.dtype] = {"turn": torch.int64, "left": torch.int64, "baseline": torch.float64}
"""Labels that are numbers, not names."""


def anchor_of(prompt_ids: Sequence[int]) -> str:
    """Returns a prompt's hash, 32 hexadecimal digits: the same in every process and on every machine.

    128 bits of BLAKE2b: a collision among a million prompts has a probability below 1e-26.
    """
    return hashlib.blake2b(np.asarray(prompt_ids, dtype="<i8").tobytes(), digest_size=16).hexdigest()


def factorise(labels: Sequence[Hashable]) -> tuple[Tensor, list[Hashable]]:
    """Returns dense ids (N,) in order of first appearance, and the distinct labels."""
    # Runs in C, about as fast as pandas.factorize, which would give None and NaN the id -1.
    ids: defaultdict[Hashable, int] = defaultdict(count().__next__)
    codes = np.fromiter(map(ids.__getitem__, labels), dtype=np.int64, count=len(labels))
    return torch.from_numpy(codes), list(ids)


def row_ids(rows: Sequence[Mapping[str, Any]], spec: EstimatorSpec) -> dict[str, Tensor]:
    """Returns the `Labels` of rows with these tags, as the spec needs them; raises ValueError if a row lacks a tag."""
    needs = spec.needs
    ids = {"groups": factorise([row["group"] for row in rows])[0]}
    for need, (_, name) in TAGS.items():
        if need in needs:
            found = _tags(rows, need, spec)
            ids[name] = torch.tensor(found, dtype=_NUMBERS[need]) if need in _NUMBERS else factorise(found)[0]
    if spec.center == "leave_one_out" and spec.unit == "row":
        # What shares a row's fate: its episode, of which a decision's candidates are alternatives.
        ids["units"] = factorise([(row["episode"], row["candidate"]) for row in rows])[0]
    if spec.main_agent is not None:
        ids["mains"] = rows_of_agent(rows, spec.main_agent, spec)
    return ids


def rows_of_agent(rows: Sequence[Mapping[str, Any]], agent: str, spec: EstimatorSpec) -> Tensor:
    """Returns which rows are those of an agent, or of a mixture's part: (N,) bool. Raises as `row_ids`."""
    own = f"{agent}."
    named = [name == agent or name.startswith(own) for name in _tags(rows, "agent", spec)]
    return torch.tensor(named, dtype=torch.bool)


def parts_of(rows: Sequence[Mapping[str, Any]], spec: EstimatorSpec) -> Tensor:
    """Returns the rows' parts of a mixture, one for all without one: (N,) int64. Raises as `row_ids`."""
    return factorise([part_of(name) for name in _tags(rows, "agent", spec)])[0]


def _tags(rows: Sequence[Mapping[str, Any]], need: Need, spec: EstimatorSpec) -> list[Any]:
    tag = TAGS[need][0]
    found = [row.get(tag) for row in rows]
    if None in found:
        raise ValueError(f"a row has no tag {tag!r}; estimator {spec.name!r} needs its {need}")
    return found
