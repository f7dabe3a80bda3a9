"""From the rewards of a batch to its advantages: the formula of the spec's fields, for each part and agent."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verl_atgrpo.train.estimators import agentrl, dr_mas, gigpo, grpo, m_grpo, mas_grpo
from verl_atgrpo.train.estimators.labels import factorise, parts_of, row_ids, rows_of_agent
from verl_atgrpo.train.estimators.spec import EstimatorSpec


def team_advantages(rewards: Tensor, rows: Sequence[Mapping[str, Any]], spec: EstimatorSpec) -> Tensor:
    """Returns the advantages of a team's rows with these rewards and tags, each by its agent's spec: (N,) -> (N,).

    Raises as `row_ids` and `group_advantages`.
    """
    result = (_by_part if spec.parts else _by_agent)(rewards, rows, spec)
    if spec.by_task == "none":
        return result
    tokens = [row["response_len"] if spec.by_task == "tokens" else 1 for row in rows]
    weights = torch.tensor(tokens, dtype=torch.float64)
    by_agent = {agent for agent in {row["agent"] for row in rows} if "group" not in spec.of_agent(agent).scopes}
    groups = factorise([(row["group"], row["agent"] if row["agent"] in by_agent else "") for row in rows])[0]
    return agentrl.by_task(result.double(), parts_of(rows, spec), groups, weights, spec.eps).to(result.dtype)


def _by_part(rewards: Tensor, rows: Sequence[Mapping[str, Any]], spec: EstimatorSpec) -> Tensor:
    result, left = torch.empty_like(rewards), torch.ones(len(rows), dtype=torch.bool)
    theirs = {part: rows_of_agent(rows, part, spec) for part in spec.parts}
    for part, own in [*spec.parts.items(), ("", replace(spec, parts={}))]:
        chosen = theirs[part] if part else left
        left = left & ~chosen
        if numbers := chosen.nonzero().flatten().tolist():
            result[chosen] = _by_agent(rewards[chosen], [rows[number] for number in numbers], own)
    return result


def _by_agent(rewards: Tensor, rows: Sequence[Mapping[str, Any]], spec: EstimatorSpec) -> Tensor:
    shared = replace(spec, agents={}, by_task="none")
    result = group_advantages(rewards, spec=shared, **row_ids(rows, shared))
    # A part of a mixture first: what is said of an agent itself comes before what is said of its part.
    for agent in sorted(spec.agents, key=lambda name: "." in name):
        own = replace(spec.agents[agent], by_task="none")
        theirs = group_advantages(rewards, spec=own, **row_ids(rows, own))
        result = torch.where(rows_of_agent(rows, agent, spec), theirs, result)
    return result


def group_advantages(rewards: Tensor, groups: Tensor, spec: EstimatorSpec, **inputs: Tensor | None) -> Tensor:
    """Computes each row's advantage over its group; exactly 0 where the mean is its baseline and rewards are equal.

    Shapes: rewards (N,) floating; groups (N,) int64, any integers -> (N,) with dtype and device of `rewards`. `inputs`
    are exactly the other `Labels` that `spec.needs`, None is the same as missing; episodes (`units`) are
    distinct across groups.

    Raises ValueError for a reward that is not finite, a trajectory with two rewards or in two groups, and a formula
    that returns no advantage for each row.
    """
    labels = {"groups": groups, **{name: ids for name, ids in inputs.items() if ids is not None}}
    # float64: in float32 a large common offset would leave no digits for the spread.
    values = rewards.detach().double()
    finite = values.isfinite()
    if not bool(finite.all()):
        raise ValueError(f"rewards: {values[~finite][0].item()} is not finite")
    result = spec.formula(values, labels)
    if result is not None:
        if result.shape != values.shape or result.dtype != values.dtype:
            found = f"{result.dtype} {tuple(result.shape)}"
            raise ValueError(f"estimator {spec.name!r}: its formula returns {found}, not float64 ({len(values)},)")
        return result.to(rewards.dtype)
    undiscounted = values
    if spec.discount != 1:
        values = values * spec.discount ** labels["left"].double()
    if spec.unit == "call":
        result = m_grpo.advantages(values, labels, spec)
    elif spec.unit == "trajectory":
        result = mas_grpo.advantages(values, labels, spec)
    elif "agent" in spec.scopes:
        result = dr_mas.advantages(values, labels, spec)
    else:
        result = grpo.advantages(values, labels, spec)
    if spec.step_weight:
        result = result + spec.step_weight * gigpo.step_term(undiscounted, labels, spec)
    return result.to(rewards.dtype)
