"""Statistics of groups, shared by the papers' formulas: float64, vectorised, and equal rewards give exactly 0.

Everything is a method of the tensors that come in: torch itself is not imported (see the package).
"""

import math

from verl_atgrpo.train.estimators.spec import EstimatorSpec, Tensor

ROUNDING = 2.0**-48
"""Values that are no further than this from their group's mean, relative to the group's largest or to 1, are equal to
it: 16 times the precision of float64. Rewards are sums of products: .1 + .2 and .3 are the same reward."""


def standardise(
    values: Tensor,
    groups: Tensor,
    spec: EstimatorSpec,
    scale_groups: Tensor | None = None,
    weights: Tensor | None = None,
    units: Tensor | None = None,
) -> Tensor:
    """Returns values minus the spec's `center`, divided by its `scale`; a group of one gets its `singleton`.

    Shapes: values (N,) float64; groups (N,) int64, any integers; scale_groups (N,) int64, the groups of the scale if
    they differ; weights (N,) float64, how often a value counts, by default once; units (N,) int64, the episodes that
    `leave_one_out` leaves out, by default the value alone -> (N,).
    """
    group, size, deviation = deviations(values, groups, weights)
    result = values if spec.center == "none" else deviation
    # One factor for each group, gathered once: gathers take most of the time.
    factor, alone = size.new_ones(len(size)), None
    if spec.center == "leave_one_out":
        if units is None:
            # r_i - (S - r_i) / (n - 1), computed from the deviation for precision.
            factor = size / (size - 1)
        else:
            # r_i - (S - S_u) / (n - n_u) with the sum and the number of its episode's rows.
            unit, total = dense(pairs(group, units))
            others = size[group] - unit.bincount(minlength=total)[unit]
            result = deviation + group_sum(deviation, unit, total)[unit] / others.clamp(min=1)
            alone = others == 0
    if scale_groups is not None:
        other, other_size, spread = deviations(values, scale_groups, weights)
        ones = other_size.new_ones(len(other_size))
        result = result * _over_std(ones, other, other_size, spread, spec, weights)[other]
    elif spec.scale == "std":
        factor = _over_std(factor, group, size, deviation, spec, weights)
    # The factor of a group of one may be 0 / 0, and 0 * nan is nan.
    result = result * factor.where(size > 1, 0.0)[group]
    if alone is not None:
        result = result.masked_fill(alone, 0.0)
    if spec.singleton == "zero":
        return result
    return values.where((size == 1)[group] if alone is None else alone, result)


def deviations(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the groups' dense ids (N,) and sizes (G,), and each value's distance from its group's mean (N,)."""
    group, total = dense(groups)
    size = group.bincount(weights, minlength=total).to(values.dtype)
    unused = None if weights is None else weights == 0
    lowest = group_min(values if unused is None else values.masked_fill(unused, math.inf), group, total)
    highest = -group_min(-values if unused is None else -values.masked_fill(unused, -math.inf), group, total)
    # Relative to a member of the group, equal rewards are exactly 0 and stay 0.
    relative = values - lowest[group]
    weighted = relative if weights is None else relative * weights
    deviation = relative - (group_sum(weighted, group, total) / size)[group]
    # A division by eps = 1e-6 would turn what sums and means are rounded by into a signal.
    noise = ROUNDING * highest.maximum(-lowest).clamp(min=1)
    return group, size, deviation.masked_fill(deviation.abs() <= noise[group], 0.0)


def _over_std(
    factor: Tensor, group: Tensor, size: Tensor, deviation: Tensor, spec: EstimatorSpec, weights: Tensor | None
) -> Tensor:
    """Divides the groups' factors (G,) by their standard deviations."""
    squares = deviation.square() if weights is None else deviation.square() * weights
    std = (group_sum(squares, group, len(size)) / (size - spec.ddof)).sqrt()
    # No scale without spread: values that are not centred on this group must not explode.
    return (factor / (std + spec.eps)).where(std > 0, factor)


def pairs(first: Tensor, second: Tensor) -> Tensor:
    """Returns one id for each pair of ids: (N,) and (N,) -> (N,)."""
    (left, _), (right, bound) = dense(first), dense(second)
    return left * bound + right


def dense(ids: Tensor) -> tuple[Tensor, int]:
    """Returns ids to index with, and their bound; does not sort ids below their number (gaps are harmless)."""
    if len(ids) and int(ids.min()) >= 0 and (bound := int(ids.max()) + 1) <= len(ids):
        return ids, bound
    names, numbers = ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]  # torch has no types for it
    return numbers, len(names)


def group_min(values: Tensor, ids: Tensor, total: int) -> Tensor:
    """Returns the least value of each id: (N,) and dense ids (N,) -> (total,)."""
    return values.new_zeros(total).scatter_reduce_(0, ids, values, "amin", include_self=False)


def group_sum(values: Tensor, ids: Tensor, total: int) -> Tensor:
    """Returns the sum of each id's values: (N,) and dense ids (N,) -> (total,)."""
    return values.new_zeros(total).index_add_(0, ids, values)
