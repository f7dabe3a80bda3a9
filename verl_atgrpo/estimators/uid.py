"""What a row's uid says of it: the only place, beside rewards and masks, from which verl lets an estimator learn.

Nothing here imports verl. Rows get their uids in `rollout.rows`; estimators and metrics read them here.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl_atgrpo.estimators.spec import EstimatorSpec

UID_SEPARATOR = "#"
"""Stands between group and trajectory in a row's uid; not `_`, which verl's row keys are split at."""

AGENT_SEPARATOR = "@"
"""Stands between trajectory and agent in a row's uid; agents' names are identifiers, so none has it."""

STEP_SEPARATOR = "~"
"""Stands before the decisions left and before the anchor in a row's uid; no identifier has it."""

_FORMAT = "GROUP#TRAJECTORY@AGENT~LEFT~ANCHOR"


class UidParts(NamedTuple):
    """What a row's uid says of it."""

    group: str
    trajectory: str | None = None
    agent: str | None = None
    left: int | None = None
    """Decisions that the episode took after this one, whoever took them."""
    anchor: str | None = None
    """Equal for rows that answer the same prompt, see `anchor_of`."""


def join_uid(parts: UidParts) -> str:
    """Returns the uid that `split_uid` splits into `parts`, of which only the last ones may be None."""
    separators = ("", UID_SEPARATOR, AGENT_SEPARATOR, STEP_SEPARATOR, STEP_SEPARATOR)
    given = [(separator, part) for separator, part in zip(separators, parts, strict=True) if part is not None]
    return "".join(f"{separator}{part}" for separator, part in given)


def split_uid(uid: str) -> UidParts:
    """Splits a row's uid, "GROUP#TRAJECTORY@AGENT~LEFT~ANCHOR" or that without its last parts, into its parts.

    The last `#` counts, and the first `@` and `~` behind it: a uid without `#` is a group whatever else it holds.

    Raises:
        ValueError: a part is empty, or LEFT is not a number.
    """
    group, separator, rest = uid.rpartition(UID_SEPARATOR)
    if not separator:
        return UidParts(uid)
    trajectory, named, rest = rest.partition(AGENT_SEPARATOR)
    agent, stepped, rest = rest.partition(STEP_SEPARATOR)
    left, anchored, anchor = rest.partition(STEP_SEPARATOR)
    if not (group and trajectory) or (named and not agent) or (stepped and not left) or (anchored and not anchor):
        raise ValueError(f"uid {uid!r}: empty part; expected {_FORMAT!r} or that without its last parts")
    if stepped and not (left.isascii() and left.isdigit()):
        raise ValueError(f"uid {uid!r}: {left!r} is not a number of decisions; expected {_FORMAT!r}")
    return UidParts(group, trajectory, agent or None, int(left) if stepped else None, anchor or None)


def anchor_of(prompt_ids: Sequence[int]) -> str:
    """Returns 32 hexadecimal digits that stand for a prompt: the same in every process and on every machine.

    128 bits of BLAKE2b: among a million prompts, two share them with a probability below 1e-26.
    """
    return hashlib.blake2b(np.asarray(prompt_ids, dtype="<i8").tobytes(), digest_size=16).hexdigest()


def factorise(labels: Sequence[Hashable] | npt.NDArray[Any]) -> tuple[Tensor, list[Hashable]]:
    """Returns dense ids (N,) in order of first appearance, and the distinct labels they stand for."""
    values = labels.tolist() if isinstance(labels, np.ndarray) else labels
    # The whole loop runs in C, about as fast as pandas.factorize, which would number None and NaN -1.
    ids: defaultdict[Hashable, int] = defaultdict(count().__next__)
    codes = np.fromiter(map(ids.__getitem__, values), dtype=np.int64, count=len(values))
    return torch.from_numpy(codes), list(ids)


def encode_groups(labels: Sequence[Hashable]) -> Tensor:
    """Numbers labels 0, 1, 2, ... in order of first appearance; equal labels get equal numbers.

    Shapes: N labels -> (N,) int64 on the CPU.
    """
    return factorise(labels)[0]


@dataclass(frozen=True)
class RowIds:
    """The rows' uids as numbers: (N,) int64 each, None for what the estimator does not read."""

    groups: Tensor
    units: Tensor | None = None
    """Trajectories, distinct across groups."""
    agents: Tensor | None = None
    """Positions in `agent_names`."""
    left: Tensor | None = None
    anchors: Tensor | None = None
    agent_names: tuple[str, ...] = ()

    def of_agent(self, name: str) -> Tensor:
        """Returns which rows are this agent's: (N,) bool."""
        assert self.agents is not None  # encoded wherever an estimator names an agent
        return self.agents == (self.agent_names.index(name) if name in self.agent_names else -1)


def encode_uids(uids: npt.NDArray[Any], spec: EstimatorSpec, device: torch.device) -> RowIds:
    """Returns the ids of the rows' groups and of whatever else of their uids the estimator needs.

    Raises:
        ValueError: a uid cannot be split, or lacks a part that the estimator needs.
    """
    codes, labels = factorise(uids)
    names = [str(label) for label in labels]
    needs = spec.needs
    # Distinct labels only, and only if one has a separator: plain verl uids cost nothing here.
    if not needs and not any(UID_SEPARATOR in name for name in names):
        return RowIds(codes.to(device))
    parts = [split_uid(name) for name in names]
    columns = {field: [part[number] for part in parts] for number, field in enumerate(UidParts._fields)}
    for need, column in columns.items():
        if need in needs and None in column:
            name = names[column.index(None)]
            raise ValueError(f"index: uid {name!r} names no {need}; estimator {spec.name!r} needs {_FORMAT!r}")

    def ids(labels: Sequence[Hashable]) -> Tensor:
        return encode_groups(labels)[codes].to(device)

    agents, agent_names = factorise(columns["agent"])
    return RowIds(
        groups=ids(columns["group"]),
        units=ids([part[:2] for part in parts]) if "trajectory" in needs else None,
        agents=agents[codes].to(device) if "agent" in needs else None,
        left=torch.tensor(columns["left"], dtype=torch.int64)[codes].to(device) if "left" in needs else None,
        anchors=ids(columns["anchor"]) if "anchor" in needs else None,
        agent_names=tuple(str(name) for name in agent_names),
    )
