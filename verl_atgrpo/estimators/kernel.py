"""Group-relative advantages: one vectorised kernel for every estimator, for teams and for plain jobs.

Rows are compared by labels (groups, trajectories, agents, prompts), which are tags of a team's rows, set in
`rollout.rows`; the kernel takes them as integers. The plugin registers `at_grpo_advantage` with verl; nothing here
imports verl.
"""

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl_atgrpo.estimators.spec import EstimatorSpec, Need, configured_spec

_LABELS: Mapping[Need, tuple[str, str]] = {
    "agent": ("agent", "agents"),
    "trajectory": ("episode", "units"),
    "left": ("left", "left"),
    "anchor": ("anchor", "anchors"),
}
"""Label that an estimator needs beside the group -> the row's tag, and the input of `group_advantages`."""


def anchor_of(prompt_ids: Sequence[int]) -> str:
    """Returns a prompt's hash, 32 hexadecimal digits: the same in every process and on every machine.

    128 bits of BLAKE2b: a collision among a million prompts has a probability below 1e-26.
    """
    return hashlib.blake2b(np.asarray(prompt_ids, dtype="<i8").tobytes(), digest_size=16).hexdigest()


ROUNDING = 2.0**-48
"""Values that are no further than this from their group's mean, relative to the group's largest or to 1, are equal to
it: 16 times the precision of float64. Rewards are sums of products: .1 + .2 and .3 are the same reward."""


def factorise(labels: Sequence[Hashable] | npt.NDArray[Any]) -> tuple[Tensor, list[Hashable]]:
    """Returns dense ids (N,) in order of first appearance, and the distinct labels."""
    values = labels.tolist() if isinstance(labels, np.ndarray) else labels
    # Runs in C, about as fast as pandas.factorize, which would give None and NaN the id -1.
    ids: defaultdict[Hashable, int] = defaultdict(count().__next__)
    codes = np.fromiter(map(ids.__getitem__, values), dtype=np.int64, count=len(values))
    return torch.from_numpy(codes), list(ids)


def row_ids(rows: Sequence[Mapping[str, Any]], spec: EstimatorSpec) -> dict[str, Tensor]:
    """Returns the groups of rows with these tags, and the further inputs of `group_advantages` that the spec needs.

    Raises:
        ValueError: a row lacks a tag that the estimator needs.
    """
    needs = spec.needs
    ids = {"groups": factorise([row["group"] for row in rows])[0]}
    for need, (_, name) in _LABELS.items():
        if need in needs:
            labels = _labels(rows, need, spec)
            ids[name] = torch.tensor(labels, dtype=torch.int64) if need == "left" else factorise(labels)[0]
    if spec.main_agent is not None:
        ids["mains"] = _of_agent(rows, spec.main_agent, spec)
    return ids


def _labels(rows: Sequence[Mapping[str, Any]], need: Need, spec: EstimatorSpec) -> list[Any]:
    tag = _LABELS[need][0]
    found = [row.get(tag) for row in rows]
    if None in found:
        raise ValueError(f"a row has no tag {tag!r}; estimator {spec.name!r} needs its {need}")
    return found


def _of_agent(rows: Sequence[Mapping[str, Any]], agent: str, spec: EstimatorSpec) -> Tensor:
    return torch.tensor([name == agent for name in _labels(rows, "agent", spec)], dtype=torch.bool)


def group_advantages(rewards: Tensor, groups: Tensor, spec: EstimatorSpec, **inputs: Tensor | None) -> Tensor:
    """Computes each row's advantage over its group; exactly 0 in a group without spread that is centred on itself.

    With unit "call" (M-GRPO) no row is copied: a row is weighted in the statistics by its number of copies, and its
    advantage is multiplied by it. So a sum over rows, such as a policy's gradient before the division by a number of
    rows or tokens, equals the sum over copies. An agent without a call in an episode has no copies there.

    Shapes: rewards (N,) floating; groups (N,) int64, any integers -> (N,) with dtype and device of `rewards`. `inputs`
    are exactly those that `spec.needs`, None is the same as missing: units (N,) int64, trajectories, distinct across
    groups; agents (N,) int64; left (N,) int64, number of later decisions in the episode; anchors (N,) int64, prompts;
    with unit "call" mains (N,) bool, True for the rows of the main agent.

    Raises:
        ValueError: other shapes or dtypes; a reward is not finite; an input is missing, or given without need;
            a trajectory with two rewards or in two groups; `spec` has specs of single agents, which need
            `team_advantages`.

    Source: GRPO arXiv 2402.03300 section 4.1; Dr. GRPO arXiv 2503.20783; RLOO arXiv 2402.14740; AT-GRPO
    arXiv 2510.11062; Dr. MAS arXiv 2602.08847 Eq. 5; GiGPO arXiv 2505.10978; M-GRPO arXiv 2511.13288. The formulas of
    each are in docs/estimators.md.
    """
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise ValueError(f"rewards: expected floating (N,), got {rewards.dtype} {tuple(rewards.shape)}")
    rows = {name: ids for name, ids in inputs.items() if ids is not None}
    _check_inputs(rewards, groups, spec, rows)

    # float64: in float32 a large common offset would leave no digits for the spread.
    values = rewards.detach().double()
    finite = values.isfinite()
    if not bool(finite.all()):
        raise ValueError(f"rewards: {values[~finite][0].item()} is not finite")

    result = _main_term(values, groups, spec, rows)
    if spec.step_weight:
        result = result + spec.step_weight * _step_term(values, groups, spec, rows)
    return result.to(rewards.dtype)


def _check_inputs(rewards: Tensor, groups: Tensor, spec: EstimatorSpec, rows: Mapping[str, Tensor]) -> None:
    for name, tensor in {"groups": groups, **rows}.items():
        dtype = torch.bool if name == "mains" else torch.int64
        if tensor.shape != rewards.shape or tensor.dtype != dtype:
            found = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"{name}: expected {dtype} ({len(rewards)},), got {found}")
    if spec.agents:
        raise ValueError(f"spec: {spec.name!r} changes single agents ({', '.join(spec.agents)}); pass one spec a call")
    needed = {_LABELS[need][1] for need in spec.needs} | ({"mains"} if spec.unit == "call" else set())
    for name in sorted(needed ^ rows.keys()):
        found, has = ("missing", "needs") if name in needed else ("given", "does not need")
        raise ValueError(f"{name}: {found}, but estimator {spec.name!r} {has} them")
    if spec.unit == "call" and spec.sub_calls is None:
        raise ValueError(f"spec: {spec.name!r} has no sub_calls")


def _main_term(values: Tensor, groups: Tensor, spec: EstimatorSpec, rows: Mapping[str, Tensor]) -> Tensor:
    """Returns the advantages of float64 values without the step term: (N,)."""
    if spec.unit == "trajectory":
        values, groups, unit_of_row = _collapse(values, groups, rows["units"])
        return _standardise(values, groups, spec)[unit_of_row]
    scopes = {"group": groups, "agent": _pairs(groups, rows["agents"]) if "agents" in rows else groups}
    same = spec.scale == "none" or spec.scale_scope == spec.center_scope
    scale_groups = None if same else scopes[spec.scale_scope]
    if spec.unit == "row":
        return _standardise(values, scopes[spec.center_scope], spec, scale_groups)
    weights, copies = _aligned(values, spec, rows)
    return copies * _standardise(values, scopes[spec.center_scope], spec, scale_groups, weights)


def _step_term(values: Tensor, groups: Tensor, spec: EstimatorSpec, rows: Mapping[str, Tensor]) -> Tensor:
    """Returns the advantages of discounted outcomes over the rows with the same prompt: (N,), 0 without others."""
    same_prompt = _pairs(groups, rows["anchors"])
    if spec.step_scope == "agent":
        same_prompt = _pairs(same_prompt, rows["agents"])
    # The only reward is paid at the episode's last decision.
    returns = values * torch.pow(spec.step_gamma, rows["left"].double())
    return _standardise(returns, same_prompt, replace(spec, singleton="zero"))


def _aligned(values: Tensor, spec: EstimatorSpec, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns each row's weight in the statistics and its number of copies in training: (N,) float64 each.

    Of the n rows of an episode and agent, each has D // n copies and the D % n earliest have one more: cyclic
    duplicates if n < D, and the latest rows dropped if n > D. Each row of the main agent has one copy, and the first
    represents the episode in the statistics.
    """
    assert spec.sub_calls is not None
    call, total = _dense(_pairs(rows["units"], rows["agents"]))
    count = torch.bincount(call, minlength=total)
    # Sorted by episode and agent, then by decision, independently of the order in the batch.
    order = rows["left"].argsort(descending=True, stable=True)
    order = order[call[order].argsort(stable=True)]
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=order.device) - (count.cumsum(0) - count)[call[order]]
    number = count[call]
    copies = spec.sub_calls // number + (position < spec.sub_calls % number)
    first = rows["mains"] & (position == 0)
    differs = rows["mains"] & (values != _group_min(values, call, total)[call])
    if bool(differs.any()):
        unit = rows["units"][differs][0].item()
        raise ValueError(
            f"units: the main agent's rows of trajectory {unit} have different rewards; it has one outcome"
        )
    weights = torch.where(rows["mains"], first.to(copies.dtype), copies)
    return weights.to(values.dtype), torch.where(rows["mains"], 1, copies).to(values.dtype)


def _collapse(values: Tensor, groups: Tensor, units: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns value and group of each trajectory, and the index of each row's trajectory."""
    unit_of_row, total = _dense(units)
    unit_values = _group_min(values, unit_of_row, total)
    unit_groups = _group_min(groups, unit_of_row, total)
    for what, rows, chosen in (("rewards", values, unit_values), ("groups", groups, unit_groups)):
        # All rows are equal exactly if each equals the minimum.
        expected = chosen[unit_of_row]
        differs = rows != expected
        if bool(differs.any()):
            row = int(differs.nonzero()[0])
            raise ValueError(
                f"units: trajectory {units[row].item()} has rows with different {what} "
                f"({expected[row].item()} and {rows[row].item()}); a trajectory has one outcome and one group"
            )
    return unit_values, unit_groups, unit_of_row


def _standardise(
    values: Tensor,
    groups: Tensor,
    spec: EstimatorSpec,
    scale_groups: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Centres and scales float64 values by their groups, each with its weight in `weights`; `scale_groups` are the
    groups of the scale if they differ."""
    group, size, deviation = _deviations(values, groups, weights)
    result = values if spec.center == "none" else deviation
    # One factor per group, gathered once: gathers take most of the time.
    factor = torch.ones_like(size)
    if spec.center == "leave_one_out":
        # r_i - (S - r_i) / (n - 1), computed from the deviation for precision.
        factor = size / (size - 1)
    if scale_groups is not None:
        scaled_by = _deviations(values, scale_groups, weights)
        result = result * _over_std(torch.ones_like(scaled_by[1]), scaled_by, spec, weights)[scaled_by[0]]
    elif spec.scale == "std":
        factor = _over_std(factor, (group, size, deviation), spec, weights)
    # The factor of a group of one may be 0 / 0, and 0 * nan is nan.
    result = result * torch.where(size > 1, factor, 0.0)[group]
    return torch.where((size == 1)[group], values, result) if spec.singleton == "raw" else result


def _deviations(values: Tensor, groups: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dense group ids (N,), the groups' sizes (G,), and the deviations from the groups' means (N,)."""
    group, total = _dense(groups)
    size = torch.bincount(group, weights, minlength=total).to(values.dtype)
    unused = None if weights is None else weights == 0
    lowest = _group_min(values if unused is None else values.masked_fill(unused, torch.inf), group, total)
    highest = -_group_min(-values if unused is None else -values.masked_fill(unused, -torch.inf), group, total)
    # Relative to a member of the group, equal rewards are exactly 0 and stay 0.
    relative = values - lowest[group]
    weighted = relative if weights is None else relative * weights
    deviation = relative - (_group_sum(weighted, group, total) / size)[group]
    # A division by eps = 1e-6 would turn what sums and means are rounded by into a signal.
    noise = ROUNDING * torch.maximum(highest, -lowest).clamp(min=1)
    return group, size, torch.where(deviation.abs() <= noise[group], 0.0, deviation)


def _over_std(
    factor: Tensor, deviations: tuple[Tensor, Tensor, Tensor], spec: EstimatorSpec, weights: Tensor | None
) -> Tensor:
    """Divides the groups' factors (G,) by their standard deviations."""
    group, size, deviation = deviations
    squares = deviation.square() if weights is None else deviation.square() * weights
    std = (_group_sum(squares, group, len(size)) / (size - spec.ddof)).sqrt()
    # No scale without spread: values that are not centred on this group must not explode.
    return torch.where(std > 0, factor / (std + spec.eps), factor)


def _pairs(first: Tensor, second: Tensor) -> Tensor:
    """Returns one id for each pair of ids."""
    (dense, _), (other, bound) = _dense(first), _dense(second)
    return dense * bound + other


def _dense(ids: Tensor) -> tuple[Tensor, int]:
    """Returns ids to index with, and their bound; does not sort ids below their number (gaps are harmless)."""
    if len(ids) and int(ids.min()) >= 0 and (bound := int(ids.max()) + 1) <= len(ids):
        return ids, bound
    names, dense = torch.unique(ids, return_inverse=True)
    return dense, len(names)


def _group_min(values: Tensor, ids: Tensor, total: int) -> Tensor:
    return values.new_zeros(total).scatter_reduce_(0, ids, values, "amin", include_self=False)


def _group_sum(values: Tensor, ids: Tensor, total: int) -> Tensor:
    return values.new_zeros(total).index_add_(0, ids, values)


def at_grpo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: Any = None,
    index: npt.NDArray[Any] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Computes the advantages of a plain job's batch, with verl's signature of an advantage estimator.

    Reads `at_grpo_estimator` and `norm_adv_by_std_in_grpo` from `config`, verl's `algorithm` section (DictConfig,
    dataclass or None). verl 0.9.1 passes this switch to custom estimators in `config` only; a keyword, as verl's own
    functions have, takes precedence. Ignores other keywords.

    Shapes: token_level_rewards (N, L), summed to the reward of the row; response_mask (N, L), zeros in a row of
    padding; index (N,) labels of groups, verl's `uid` -> advantages and returns, the same tensor (N, L).

    Raises:
        ValueError: `index` missing or of another length, a mask of another shape, an estimator that needs more than
            groups, or an error of `configured_spec` or `group_advantages`.

    Source: AT-GRPO arXiv 2510.11062; outcome supervision, GRPO arXiv 2402.03300 section 4.1.2.
    """
    rewards, mask = token_level_rewards.detach(), response_mask
    if index is None:
        raise ValueError("index: missing; groups are formed by verl's 'uid' field")
    if rewards.dim() != 2 or mask.shape != rewards.shape or len(index) != len(rewards):
        raise ValueError(
            f"token_level_rewards {tuple(rewards.shape)}, response_mask {tuple(mask.shape)} and index "
            f"({len(index)},): expected (N, L), (N, L) and (N,)"
        )

    def option(key: str, default: Any) -> Any:
        # `get` for DictConfig and verl's dataclasses: both lack our key unless the user added it.
        return config.get(key, default) if hasattr(config, "get") else getattr(config, key, default)

    norm_by_std = kwargs.get("norm_adv_by_std_in_grpo")
    norm_by_std = option("norm_adv_by_std_in_grpo", True) if norm_by_std is None else norm_by_std
    spec = configured_spec(option("at_grpo_estimator", "at_grpo"), norm_by_std)
    if spec.needs:
        raise ValueError(
            f"algorithm.at_grpo_estimator={spec.name!r} needs {', '.join(sorted(spec.needs))}, but a plain job's rows "
            "have groups only; set trainer.v1.trainer_mode=at_grpo"
        )
    valid = mask.bool().any(dim=-1)
    row_rewards = rewards.sum(dim=-1, dtype=torch.float64)
    groups = factorise(np.asarray(index, dtype=object)[valid.numpy(force=True)])[0].to(rewards.device)
    real = group_advantages(row_rewards[valid], groups, spec)
    advantages = torch.zeros_like(row_rewards).masked_scatter_(valid, real).to(rewards.dtype)
    per_token = advantages.unsqueeze(-1) * mask.to(rewards.dtype)
    return per_token, per_token


def team_advantages(rewards: Tensor, rows: Sequence[Mapping[str, Any]], spec: EstimatorSpec) -> Tensor:
    """Returns the advantages of a team's rows with these rewards and tags, each by its agent's spec: (N,) -> (N,).

    Raises as `row_ids` and `group_advantages`.
    """
    shared = replace(spec, agents={})
    result = group_advantages(rewards, spec=shared, **row_ids(rows, shared))
    for agent, own in spec.agents.items():
        theirs = group_advantages(rewards, spec=own, **row_ids(rows, own))
        result = torch.where(_of_agent(rows, agent, spec), theirs, result)
    return result


def inflation_factors(rewards: Tensor, agents: Sequence[str]) -> dict[str, float]:
    """Returns the factor by which pooled normalisation inflates each agent's gradient: (s_k^2 + (mu_k - mu)^2) / s^2.

    With 1 the pooled statistics fit the agent; above 1 its updates are larger than with its own statistics. Uses
    population variances, so that the row-weighted mean of the factors is 1. Without spread all are 1.

    Shapes: rewards (N,) of real rows only; agents: N names -> one factor per distinct name.

    Raises:
        ValueError: rewards of another shape than (N,), or not finite.

    Source: Dr. MAS arXiv 2602.08847.
    """
    if rewards.shape != (len(agents),) or not bool(rewards.isfinite().all()):
        raise ValueError(f"rewards: expected ({len(agents)},) finite values, got shape {tuple(rewards.shape)}")
    codes, names = factorise(agents)
    codes, total = codes.to(rewards.device), len(names)
    _, _, deviation = _deviations(rewards.detach().double(), torch.zeros_like(codes), None)
    # The mean of (r - mu)^2 over the rows of agent k is s_k^2 + (mu_k - mu)^2.
    squares = deviation.square()
    variance = squares.mean()
    own = _group_sum(squares, codes, total) / torch.bincount(codes, minlength=total)
    factors = own / variance if variance > 0 else torch.ones_like(own)
    return {str(name): float(factor) for name, factor in zip(names, factors.tolist(), strict=True)}
