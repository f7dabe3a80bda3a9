"""The names for `at_grpo.estimator`: one file of this package for each, and the entry points of installed packages.

To add one, write its file with a `PRESET`, an `EstimatorSpec` whose fields say what is compared, and list it here.
Arithmetic that fields cannot express is `formula` of a subclass, as in `rae`. `verl-atgrpo schema` lists its fields.
"""

import functools
import importlib.metadata
from collections.abc import Mapping
from types import MappingProxyType

from verl_atgrpo.train.estimators import at_grpo, dr_grpo, dr_mas, gigpo, grpo, m_grpo, mas_grpo, rae, rloo
from verl_atgrpo.train.estimators.spec import CONFIG_KEY, EstimatorSpec

_PAPERS = (at_grpo, grpo, dr_grpo, rloo, mas_grpo, dr_mas, gigpo, m_grpo, rae)
PRESETS: Mapping[str, EstimatorSpec] = MappingProxyType({paper.PRESET.name: paper.PRESET for paper in _PAPERS})
"""Name -> fields. `m_grpo` also needs `main_agent` and `sub_calls`."""

ENTRY_POINTS = "verl_atgrpo.estimators"
"""Group of entry points with which installed packages register presets: a name and "module:spec"."""


@functools.cache
def presets() -> Mapping[str, EstimatorSpec]:
    """Returns `PRESETS` and those of installed packages; raises ValueError for an entry point that is not one."""
    found = dict(PRESETS)
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            spec = point.load()
        except (ImportError, AttributeError) as error:
            why = f"cannot be loaded ({type(error).__name__}: {error}); mend or uninstall its package"
            raise _refused(point, why) from error
        if point.name in found and found[point.name] != spec:
            raise _refused(point, "has the name of another preset; uninstall its package")
        if not isinstance(spec, EstimatorSpec) or spec.name != point.name:
            raise _refused(point, f"is no EstimatorSpec(name={point.name!r}, ...)")
        found[point.name] = spec
    return found


def _refused(point: importlib.metadata.EntryPoint, why: str) -> ValueError:
    place = f"the entry point {point.value!r} (group {ENTRY_POINTS})"
    return ValueError(f"{CONFIG_KEY}={point.name!r}: {place} {why}")
