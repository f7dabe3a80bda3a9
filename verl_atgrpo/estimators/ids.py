"""Encodes the labels by which estimators compare rows (groups, trajectories, agents, prompts) as integers.

The labels are tags of the rows, set in `rollout.rows`. Nothing here imports verl.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl_atgrpo.estimators.spec import EstimatorSpec, Need

GROUP = "group"
TAGS: Mapping[Need, str] = {"trajectory": "episode", "agent": "agent", "left": "left", "anchor": "anchor"}
"""Label that an estimator needs beside the group -> the row's tag."""


def anchor_of(prompt_ids: Sequence[int]) -> str:
    """Returns a prompt's hash, 32 hexadecimal digits: the same in every process and on every machine.

    128 bits of BLAKE2b: a collision among a million prompts has a probability below 1e-26.
    """
    return hashlib.blake2b(np.asarray(prompt_ids, dtype="<i8").tobytes(), digest_size=16).hexdigest()


def factorise(labels: Sequence[Hashable] | npt.NDArray[Any]) -> tuple[Tensor, list[Hashable]]:
    """Returns dense ids (N,) in order of first appearance, and the distinct labels."""
    values = labels.tolist() if isinstance(labels, np.ndarray) else labels
    # Runs in C, about as fast as pandas.factorize, which would give None and NaN the id -1.
    ids: defaultdict[Hashable, int] = defaultdict(count().__next__)
    codes = np.fromiter(map(ids.__getitem__, values), dtype=np.int64, count=len(values))
    return torch.from_numpy(codes), list(ids)


@dataclass(frozen=True)
class RowIds:
    """The rows' labels as integers: (N,) int64 each, None if the estimator does not need them."""

    groups: Tensor
    units: Tensor | None = None
    """Trajectories, distinct across groups."""
    agents: Tensor | None = None
    """Indices into `agent_names`."""
    left: Tensor | None = None
    """Number of later decisions in the episode, of all agents."""
    anchors: Tensor | None = None
    agent_names: tuple[str, ...] = ()

    def of_agent(self, name: str) -> Tensor:
        """Returns a mask of this agent's rows: (N,) bool."""
        assert self.agents is not None  # encoded if the estimator names an agent
        return self.agents == (self.agent_names.index(name) if name in self.agent_names else -1)


def row_ids(rows: Sequence[Mapping[str, Any]], spec: EstimatorSpec) -> RowIds:
    """Returns the ids of rows from their tags: of their groups, and of the other labels that the estimator needs.

    Raises:
        ValueError: a row lacks a tag that the estimator needs.
    """
    needs = spec.needs

    def labels(need: Need) -> list[Any]:
        found = [row.get(TAGS[need]) for row in rows]
        if None in found:
            raise ValueError(f"a row has no tag {TAGS[need]!r}; estimator {spec.name!r} needs its {need}")
        return found

    agents, names = factorise(labels("agent")) if "agent" in needs else (None, [])
    return RowIds(
        groups=factorise([row[GROUP] for row in rows])[0],
        units=factorise(labels("trajectory"))[0] if "trajectory" in needs else None,
        agents=agents,
        left=torch.tensor(labels("left"), dtype=torch.int64) if "left" in needs else None,
        anchors=factorise(labels("anchor"))[0] if "anchor" in needs else None,
        agent_names=tuple(map(str, names)),
    )
