"""The fields of an estimator: which rows a row is compared with, and how.

`presets` lists the papers' values, `advantages` computes. Nothing here imports verl or torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn, TypeAlias, get_type_hints

from annotated_types import Gt, Le

from verl_atgrpo.kinds import Count, Match, Weight, fits, words
from verl_atgrpo.play.types import for_agent

if TYPE_CHECKING:
    from torch import Tensor as Tensor
else:
    Tensor = Any

CONFIG_KEY = "at_grpo.estimator"
"""The user's key, in every error message."""

Unit = Literal["row", "trajectory", "call"]
Center = Literal["mean", "leave_one_out", "none"]
Scale = Literal["std", "none"]
Singleton = Literal["zero", "raw"]
Scope = Literal["group", "agent"]
ByTask = Literal["none", "rows", "tokens"]
Need = Literal["trajectory", "agent", "turn", "left", "anchor", "baseline"]
Discount = Annotated[float, Gt(0), Le(1)]
AgentName = Annotated[str, Match(r"^[^\W\d]\w*(\.[^\W\d]\w*)?$", "an agent's name")]
"""In a mixture `<part>.<agent>`."""
Labels: TypeAlias = Mapping[str, Tensor]
"""What a formula reads of N rows beside their rewards, (N,) each: `groups`, `units` (episodes), `agents` and `anchors`
(prompts) are int64 ids, `turns` are int64, `left` is the int64 number of the episode's trained decisions that started
later, `mains` is true for the rows of the main agent, `baselines` are float64. `groups` are always there, the others
if the spec `needs` them, and a team's `units` with `leave_one_out`."""


@dataclass(frozen=True, kw_only=True)
class EstimatorSpec:
    """How a group's rewards become advantages; raises ValueError for a field that is invalid or without effect."""

    reads: ClassVar[tuple[str, ...]] = ()
    """The fields below that a subclass's `formula` reads; others have no effect with it, and are refused."""

    name: str
    """Name of the preset it is based on, or its own; for logs."""

    unit: Unit = "row"
    """The values of a group. "row": one per row. "trajectory": one per episode, since a shared outcome on every row
    would weight an episode by its number of turns. "call": one per episode for `main_agent`, and for every other agent
    `sub_calls` per episode in which it acted, as if its rows had been copied or dropped."""

    center: Center = "mean"
    """The baseline. "leave_one_out" is the mean of the other episodes' rows, or of a decision's other
    candidates, so that the gradient is unbiased."""

    scale: Scale = "std"
    """The divisor. "std" gives groups that are nearly solved the largest gradients; "none" does not."""

    ddof: Literal[0, 1] = 1
    """Subtracted from the count in the variance: 1 as in verl's `torch.std`, 0 for the population variance."""

    eps: Weight = 1e-6
    """Added to the standard deviation (not to the variance), as in verl."""

    singleton: Singleton = "zero"
    """The advantage of a group of one, which has nothing to be compared with: "zero", or "raw" for its reward, as in
    verl, which reinforces every lone positive reward. The step term is 0 in either case."""

    center_scope: Scope = "group"
    """The rows of the baseline: those of the whole group, or only the row's own agent's among them. A row without
    others there is a singleton."""

    scale_scope: Scope = "group"
    """The rows of the divisor, as in `center_scope`. If they have no spread, values are not scaled."""

    discount: Discount = 1.0
    """Factor of a row's reward for each later trained decision of its episode: below 1, what is decided last counts
    most, and a short way to the reward more than a long one. Not in the step term, which has its own."""

    main_agent: AgentName | None = None
    """The agent with one value per episode, with unit "call"."""

    sub_calls: Count | None = None
    """D, the number of values per episode of every other agent, with unit "call"."""

    step_weight: Weight = 0.0
    """Weight of the step term: the advantage of the row's discounted outcome over the group's rows with the same
    prompt, with the same center, scale, ddof and eps."""

    step_gamma: Discount = 1.0
    """Discount of the outcome per later trained decision of the episode, in the step term."""

    step_scope: Scope = "group"
    """The rows with the same prompt that the step term compares: the whole group's, or the row's own agent's."""

    by_task: ByTask = "none"
    """Whether the advantages of each environment of a mixture are standardised over its `rows` or `tokens` in the
    update (AgentRL), after all else."""

    agents: Mapping[str, "EstimatorSpec"] = field(default_factory=dict)
    """Agent -> the specification for its rows. Its statistics are over the rows that its own fields select, including
    other agents'."""

    parts: Mapping[str, "EstimatorSpec"] = field(default_factory=dict)
    """Part of a mixture -> the specification for its rows, which are compared with each other only."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for item in fields(self):
            value, hint = getattr(self, item.name), hints[item.name]
            if item.name not in ("agents", "parts") and not fits(hint, value):
                raise ValueError(f"{CONFIG_KEY}.{item.name}={value!r}: {words(hint)}")
        self._refuse_without_effect()
        self._refuse_without_sense()

    def _refuse_without_effect(self) -> None:
        if type(self).formula is not EstimatorSpec.formula:
            read = ("name", "by_task", "agents", "parts", *self.reads)
            for item in fields(EstimatorSpec):
                if item.name not in read and (value := getattr(self, item.name)) != item.default:
                    why = f"{value!r} has no effect with {self.name}, whose formula does not read it; remove it"
                    refuse(item.name, why)
        if self.scale == "none" and self.scale_scope != "group":
            refuse("scale_scope", f"{self.scale_scope!r} has no effect with scale: none; set scale_scope: group")
        for key in ("main_agent", "sub_calls"):
            if self.unit != "call" and getattr(self, key) is not None:
                refuse(key, f"{getattr(self, key)!r} has no effect with unit: {self.unit}; set unit: call")
        for key, neutral in (("step_gamma", 1), ("step_scope", "group")):
            if self.step_weight == 0 and getattr(self, key) != neutral:
                value = f"{getattr(self, key)!r} has no effect with step_weight: 0"
                refuse(key, f"{value}; set {key}: {neutral}, or a step_weight above 0")

    def _refuse_without_sense(self) -> None:
        if self.unit == "trajectory" and "agent" in self.scopes:
            refuse("unit", "'trajectory' counts episodes, but the scope agent counts an agent's rows; set unit: row")
        if self.unit != "row" and self.discount != 1:
            refuse("discount", f"{self.discount!r} gives an episode's rows rewards of their own; set unit: row")
        if self.unit != "call":
            return
        if self.center == "leave_one_out":
            refuse("center", "'leave_one_out' leaves out a copy and keeps its twins with unit: call; set center: mean")
        if self.singleton == "raw":
            refuse("singleton", "'raw' has no meaning with unit: call, where a row has copies; set singleton: zero")
        if self.step_weight:
            refuse("step_weight", f"{self.step_weight!r} cannot be had with unit: call; set unit: trajectory or row")

    @property
    def scopes(self) -> frozenset[Scope]:
        """The scopes of its statistics, without the step term's."""
        return frozenset((self.center_scope, self.scale_scope) if self.scale == "std" else (self.center_scope,))

    @property
    def needs(self) -> frozenset[Need]:
        """The labels of a row that it needs beside the group."""
        needs: set[Need] = set()
        if self.unit == "trajectory":
            needs.add("trajectory")
        if self.unit == "call":
            needs |= {"trajectory", "agent", "turn", "left"}
        if self.step_weight:
            needs |= {"left", "anchor"}
        if self.discount != 1:
            needs.add("left")
        if "agent" in (*self.scopes, self.step_scope) or self.agents or self.parts or self.by_task != "none":
            needs.add("agent")
        return frozenset(needs.union(*(spec.needs for spec in (*self.agents.values(), *self.parts.values()))))

    def of_agent(self, agent: str) -> "EstimatorSpec":
        """Returns the specification for an agent's rows: what is said of it or of its part, else this."""
        of_part = for_agent(self.parts, agent, self)
        return for_agent(of_part.agents, agent, of_part)

    def formula(self, values: Tensor, labels: Labels) -> Tensor | None:
        """Returns the rows' advantages, (N,) float64 as `values`, or None: what the fields say.

        A paper whose arithmetic the fields cannot express has a subclass with this method, its `needs`, `scopes` and
        `reads`, and fields of its own.
        """
        return None


def refuse(key: str, why: str) -> NoReturn:
    """Raises the ValueError of a field."""
    raise ValueError(f"{CONFIG_KEY}.{key}: {why}")
