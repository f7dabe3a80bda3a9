"""The schema of the `at_grpo:` section: keys, types and bounds; error messages and docs are generated from it."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from verl_atgrpo.kinds import Count, Seconds, Text, Weight
from verl_atgrpo.play import registry
from verl_atgrpo.play.environment import Environment
from verl_atgrpo.play.environment_check import check_declared, tasks_of
from verl_atgrpo.play.types import EnvironmentConfigError, Selection, Split, TeamOptions, for_agent, names_of
from verl_atgrpo.train.config import SECTION as SECTION
from verl_atgrpo.train.config import ConfigError as ConfigError
from verl_atgrpo.train.estimators.choice import resolve_spec
from verl_atgrpo.train.estimators.spec import EstimatorSpec

EXPANDED = "at_grpo_policies"
"""Key under which the driver stores every policy's resolved `actor_rollout_ref` for the trainer and the workers."""
COMMAND = "at_grpo_command"
"""Key under which the driver stores the command that was typed, for the records."""
SHARED = "shared"
"""Name of the only policy of a recipe without `policies`, which is the job's `actor_rollout_ref`."""
Mode = Literal["sync", "colocate_async", "separate_async"]
MODES: tuple[str, ...] = typing.get_args(Mode)


def _identifier(name: str) -> str:
    if not name.isidentifier():
        raise ValueError("use letters, digits and underscores for a name")
    return name


Name = Annotated[str, AfterValidator(_identifier)]
Tasks = Annotated[int, Ge(1), Le(10_000_000)]
"""Numbers of tasks: each of them is made once at the start, and indexed."""
Retries = Annotated[int, Ge(0), Le(1000)]
Candidates = Annotated[int, Ge(2), Le(4096)]
Index = Annotated[int, Ge(0), Le(1_000_000)]
_AS_IN_SECTION: Any = Field(None, description="As in `at_grpo`.")
Options = dict[str, Any]
"""A section with keys of verl, of an environment or of an estimator."""


class Section(BaseModel):
    """A section of the recipe. Refuses unknown keys and does not convert values."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class Lora(Section):
    """An adapter, which is trained instead of the whole model."""

    rank: Annotated[int, Ge(1), Le(512)]
    """verl's `model.lora_rank`."""
    alpha: Count | None = None
    """`model.lora_alpha`; null: the job's."""
    target_modules: str | list[str] | None = None
    """`model.target_modules`; null: the job's."""


class PolicySettings(Section):
    """Changes to the job's `actor_rollout_ref`."""

    model: Options = {}
    """Merged into `actor_rollout_ref.model`."""
    optim: Options = {}
    """Merged into `actor_rollout_ref.actor.optim`."""
    base: Name | None = None
    """Policies with the same name here share a model, and differ in `lora` and `optim` only."""
    lora: Annotated[Lora | None, BeforeValidator(lambda block: None if block == {} else block)] = None
    """Its adapter."""
    actor: Options = {}
    """Merged into `actor_rollout_ref.actor`."""
    rollout: Options = {}
    """Merged into `actor_rollout_ref.rollout`; sampling parameters stay the job's."""
    trainable: bool = True
    """False: the policy answers but is not trained."""
    gpus: Annotated[int, Ge(1), Le(1024)] | None = None
    """Its devices on every node, with `placement: split`."""


class ReplySettings(Section):
    """How an agent answers, in training or in validation; null: as the next wider setting says."""

    max_response_length: Count | None = None
    """Most tokens of an answer, up to `data.max_response_length`."""
    stop: list[Text] | None = None
    """Texts that end an answer and are left out of it."""
    chat_template_kwargs: Options | None = None
    """Added to `data.apply_chat_template_kwargs`."""
    system: Text | None = None
    """A system message, put before that of the environment."""


class SamplingSettings(ReplySettings):
    """The keys above, where they differ in validation and evaluation, and these."""

    temperature: Annotated[float, Ge(0), Le(100)] | None = None
    """Null: `actor_rollout_ref.rollout.val_kwargs.temperature`."""
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    """Null: that of `val_kwargs`."""
    top_k: Annotated[int, Ge(-1), Le(1_000_000_000)] | None = None
    """Null: that of `val_kwargs`; -1: all tokens."""


class AgentSampling(ReplySettings):
    """How one agent answers, or `all`."""

    temperature: Annotated[float, Gt(0), Le(100)] | None = None
    """Null: `actor_rollout_ref.rollout.temperature`."""
    validation: SamplingSettings | None = None
    """What differs in validation and evaluation."""


class GroupFilter(Section):
    """Drops groups in which every advantage is 0."""

    min_groups: Count | None = None
    """Tasks are added until a step has so many groups with signal, over all trainable policies."""
    max_tasks: Tasks | None = None
    """Most tasks of a step, `data.train_batch_size` included."""


class BranchSettings(Section):
    """Where episodes branch with `scheme: branch`, and what a candidate earns (docs/branching.md).

    K is the decision's (`Decision.k`).
    """

    at: Literal["first", "random", "every"] | dict[str, Index] = "every"
    """The `first` decision of an episode, a `random` one, `every` one, or `{<agent>: <n>}`: these agents' n-th
    decisions, counted from 0."""
    continuations: Annotated[int, Ge(1), Le(4096)] = 1
    """Continuations of a candidate, whose reward is the mean of their team rewards."""
    nested: bool = False
    """Continuations branch as well: a candidate's value is the mean of the next group's values."""
    score_weight: Weight = 0.0
    """Weight of a candidate's own mixed score; with 0 no scores are computed."""
    min_tokens: Annotated[int, Ge(0)] = 0
    """Fewest prompt tokens of a branch point."""
    max_tokens: Count | None = None
    """Most prompt tokens of a branch point."""


class Opponents(Section):
    """Who answers for agents that play against those in training, drawn for each task (docs/self_play.md)."""

    policy: Name | None = None
    """The policy whose past selves play; needed if several are trained."""
    current: Weight = 1.0
    """Weight of the policies of `agents` as they are."""
    past: Weight = 1.0
    """Weight of the policy's past selves together; the policy needs `base` and `lora`."""
    others: dict[Name, Weight] = {}
    """Weights of further policies."""
    size: Annotated[int, Ge(1), Le(64)] = 8
    """Most past selves. The one that is beaten most often makes room for the next."""
    every: Count = 5
    """Training steps between two past selves; the first is the policy before training."""
    choose: Literal["prioritized", "uniform"] = "prioritized"
    """How a past self is drawn: in proportion to (1 - w)^2, w the share of games won against it, or uniformly."""


class PartSettings(Section):
    """How tasks of a part of a mixture are played and compared, where this differs from `at_grpo`."""

    scheme: Literal["tree", "parallel", "branch"] | None = None
    """With another scheme, `branch`, `episode_reward` and `selection` fall back to their defaults."""
    branch: BranchSettings | None = _AS_IN_SECTION
    episode_reward: Literal["outcome", "scores", "own"] | None = _AS_IN_SECTION
    candidates: Candidates | None = _AS_IN_SECTION
    alpha: Weight | None = _AS_IN_SECTION
    local_weight: Weight | None = _AS_IN_SECTION
    selection: Selection | None = _AS_IN_SECTION
    estimator: str | Options | None = None
    """Agents are `<part>.<agent>` in it."""


class CriticSettings(Section):
    """A learned critic: it says how good candidates were (docs/critic.md)."""

    kind: Literal["value", "likelihood"] = "value"
    """`value`: what a candidate changes of the team reward to come, by a regression on what the base reads.
    `likelihood`: how much more likely an adapter finds it than the base does, trained by pairs of a task's episodes
    that ended differently."""
    policy: Name | None = None
    """The adapter of `likelihood`, on the base of a policy that is trained. No agent answers with it."""
    agents: Annotated[list[Text], MinLen(1)] | None = None
    """Agents whose candidates it scores; null: all that are trained."""
    weight: Annotated[float, Gt(0), Le(1)] = 1.0
    """Of its score in a row's reward; the rest is that of `episode_reward`."""
    hindsight: bool = True
    """Whether it reads what the environment says of a task in hindsight."""
    lam: Annotated[float, Ge(0), Le(1)] = 0.5
    """Lambda of generalised advantages (`value`): 0 for what a candidate itself changed, 1 for the outcome less the
    value before."""
    decay: Annotated[float, Ge(0), Lt(1)] = 0.85
    """What the episodes of a step weigh beside those of the step after it (`value`)."""
    warmup: Annotated[Retries, Ge(1)] = 1
    """Steps in which it only learns: its scores have no weight."""
    epochs: Annotated[int, Ge(1), Le(100)] = 1
    """Passes over a step's episodes (`likelihood`)."""


class RecordSettings(Section):
    """Episodes recorded for reports (docs/report.md)."""

    train_tasks: Annotated[int, Ge(0), Le(1_000_000)] = 4
    """Recorded tasks of a step: those with the lowest numbers."""
    val_tasks: Annotated[int, Ge(0), Le(1_000_000)] = 4
    """Recorded tasks of a validation, likewise."""
    max_megabytes: Annotated[float, Gt(0), Le(1000)] = 64.0
    """Disk space for episodes in MB; the oldest are deleted first."""


class AtGrpoConfig(Section):
    """The section of a recipe."""

    environment: Options
    """`name`, and the options of that environment (below)."""
    agents: dict[str, str] = {"all": SHARED}
    """Agent -> policy. `all: shared` trains one policy for every agent."""
    val_agents: dict[str, str] | None = None
    """Agent -> policy in validation, where it differs: swapped roles."""
    sampling: dict[str, AgentSampling] | None = None
    """Agent -> how it answers (docs/policies.md)."""
    policies: dict[Name, PolicySettings | None] | None = None
    """Policy -> its changes to `actor_rollout_ref`. Null: one policy, `shared`."""
    placement: Literal["colocated", "split"] = "colocated"
    """`colocated`: all policies share all devices, in turns. `split`: each has its own `gpus` on every node."""
    mode: Mode = "sync"
    """`sync`: the update waits for all tasks of a step. `colocate_async`: it waits for enough of them.
    `separate_async`: servers have their own devices and sample during the update (docs/async.md)."""
    prefix_tree: Literal["auto"] | bool = "auto"
    """Log-probs and updates compute every shared prefix once (docs/prefix_trees.md). `auto`: if a test at the start
    shows that results are equal."""
    dither: bool = True
    """Lets small updates reach servers in bfloat16 and float16 (docs/precision.md)."""
    candidates: Candidates | dict[str, Candidates] = 4
    """K: candidates at a decision (`tree`) or branch point (`branch`), or episodes of a task (`parallel`), which has
    the same K for all. `{all: 4, <agent>: 8}` is a K for each agent."""
    alpha: Weight = 1.0
    """Weight of the team part in a mixed score, alpha * team + local_weight * local, the reward with `tree`."""
    local_weight: Weight = 1.0
    """Weight of the local part."""
    scheme: Literal["tree", "parallel", "branch"] = "tree"
    """`tree`: AT-GRPO. `parallel`: independent episodes, each with one reward. `branch`: a candidate's reward is what
    becomes of the episode after it (docs/branching.md)."""
    branch: BranchSettings | None = None
    """Settings of `scheme: branch` (below)."""
    episode_reward: Literal["outcome", "scores", "own"] = "outcome"
    """The reward of a row with `parallel`: the team reward of its episode's `outcome`, the sum of the mixed
    `scores` of its trained decisions, or its `own` mixed score."""
    selection: Selection = "greedy"
    """Which candidate is committed (`tree`)."""
    estimator: str | Options = "at_grpo"
    """A preset, `{preset: ..., <field>: ..., agents: {<agent>: ...}}`, or `{name: ..., <field>: ...}`
    (docs/estimators.md)."""
    group_filter: GroupFilter | None = None
    """`{}` drops groups without signal (docs/group_filter.md)."""
    critic: CriticSettings | None = None
    """A learned critic (below); null: the environment's scores alone."""
    parts: dict[str, PartSettings] | None = None
    """Part of a mixture -> how its tasks are played and compared (docs/environments.md)."""
    opponents: Opponents | None = None
    """Who answers for the other side of a game; null: the policies of `agents`."""
    seed: int = 0
    """All samples' seeds derive from it."""
    train_tasks: Tasks = 4096
    """Tasks of an epoch, at most: of a data set the first ones."""
    val_tasks: Tasks = 200
    """Tasks of validation, likewise."""
    task_order: Literal["shuffled", "half_solved"] = "shuffled"
    """`half_solved`: every other training task is one whose success is near one half (docs/environments.md)."""
    allow_overlap: bool = False
    """Accepts validation tasks that are training tasks, or nearly have the text of one."""
    max_bad_rows: Annotated[float, Ge(0), Le(1)] = 0.25
    """Largest share of bad rows among the 32 of each split that are graded at the start (docs/environments.md)."""
    request_timeout: Seconds = 600.0
    """Seconds for a candidate, or for the rest of an interrupted one."""
    request_retries: Retries = 2
    """Retries, each on another server, after a time-out or a server's death."""
    max_failed_episodes: Count = 64
    """More failed episodes than this in a step stop the run."""
    restart_servers: Retries = 3
    """Restarts of dead servers, per policy and run."""
    record: RecordSettings | None = RecordSettings()
    """Recorded episodes (below); null: none."""

    @functools.cached_property
    def spec(self) -> EstimatorSpec:
        """The estimator's specification, with those of parts; raises ConfigError for an invalid one."""
        own = {name: part.estimator for name, part in (self.parts or {}).items() if part.estimator is not None}
        made: dict[str, EstimatorSpec] = {}
        for part, choice in {"": self.estimator, **own}.items():
            try:
                made[part] = resolve_spec(choice)
            except ValueError as error:
                said = str(error)
                where = f"{SECTION}.parts.{part}." if part else f"{SECTION}."
                raise ConfigError(said.replace(f"{SECTION}.", where, 1)) from error
        return replace(made.pop(""), parts=made)

    def of_part(self, part: str) -> AtGrpoConfig:
        """Returns the settings of the tasks of a mixture's part: these, with its changes."""
        own = (self.parts or {}).get(part)
        if own is None:
            return self
        given = {key: value for key in type(own).model_fields if (value := getattr(own, key)) is not None}
        if given.get("scheme", self.scheme) != self.scheme:
            given = {"branch": None, "episode_reward": "outcome", "selection": "greedy", **given}
        if given.get("scheme", self.scheme) == "parallel" and isinstance(self.candidates, dict):
            episodes = self.candidates.get(part, self.candidates.get("all", self.fewest_candidates))
            given = {"candidates": episodes, **given}
        chosen = {**dict(self), "parts": None, **given}
        if self.model_construct(**chosen).reward_is_outcome:
            # The section's weights are those of scores, which this part does not have.
            chosen |= {"alpha": 1.0, "local_weight": 1.0, **given}
        return self.model_construct(**chosen)

    def each(self) -> Iterator[tuple[str, AtGrpoConfig]]:
        """Yields the settings with an empty text, and those of parts with the beginning of their keys."""
        yield "", self
        for part in self.parts or {}:
            yield f"parts.{part}.", self.of_part(part)

    def bases(self) -> dict[str, list[str]]:
        """Returns the policies that share a model, in their order, by the first that is trained; others are alone."""
        policies = self.policy_settings()
        found: dict[str, list[str]] = {}
        for name, policy in policies.items():
            found.setdefault(f"own {name}" if policy.base is None else f"base {policy.base}", []).append(name)
        learners = self.learners
        return {next((name for name in names if name in learners), names[0]): names for names in found.values()}

    def adapter_number(self, policy: str) -> int | None:
        """Returns the number by which the servers of a shared base know a policy's adapter; None without a base."""
        if self.policy_settings()[policy].base is None:
            return None
        return 1 + next(names.index(policy) for names in self.bases().values() if policy in names)

    @property
    def self_played(self) -> str | None:
        """The policy of which past selves play, if any do."""
        if self.opponents is None or not self.opponents.past:
            return None
        trained = self.learners
        return self.opponents.policy or (trained[0] if len(trained) == 1 else None)

    @property
    def learners(self) -> list[str]:
        """The policies that are trained with agents' rows: all that are trainable but the critic."""
        critic = None if self.critic is None else self.critic.policy
        return [name for name, block in self.policy_settings().items() if block.trainable and name != critic]

    def past_number(self, slot: int) -> int:
        """Returns the number by which the servers know the past self in a slot, from 1: after all adapters."""
        assert self.self_played is not None
        names = next(names for names in self.bases().values() if self.self_played in names)
        return len(names) + slot

    def make_environment(self) -> Environment:
        """Builds the environment; raises ConfigError for unknown names or options, or one that cannot be played."""
        options = dict(self.environment)
        name = options.pop("name")
        try:
            made = registry.make(name, **options)
            check_declared(made, name)
        except EnvironmentConfigError as error:
            raise ConfigError(str(error)) from error
        return made

    def policy_settings(self) -> dict[str, PolicySettings]:
        """Returns policy -> settings; one policy, `shared`, if the recipe lists none."""
        return {name: block or PolicySettings() for name, block in (self.policies or {SHARED: None}).items()}

    def policies_of(self, env: Environment) -> dict[str, str]:
        """Returns agent -> policy for the environment's agents, with `all` expanded; empty texts if there is none."""
        default = self.agents.get("all", "")
        return {agent: for_agent(self.agents, agent, default) for agent in env.agents}

    def validation_policies_of(self, env: Environment) -> dict[str, str]:
        """Returns agent -> policy in validation: that of training, updated with `val_agents`."""
        given = self.val_agents or {}
        policies = self.policies_of(env).items()
        return {agent: for_agent(given, agent, given.get("all", policy)) for agent, policy in policies}

    def sampling_of(self, agent: str, validate: bool) -> SamplingSettings:
        """Returns how an agent answers: `all`, `all.validation`, its own, its own `validation`, each before the last.

        In a mixture its part's come between the two. What none of them says is null, and as the rest of the job says.
        """
        parts: list[ReplySettings] = []
        for block in ((self.sampling or {}).get(name) for name in ("all", *reversed(names_of(agent)))):
            if block is not None:
                parts += [block] if block.validation is None or not validate else [block, block.validation]
        given: dict[str, Any] = {}
        for part in parts:
            # The temperature of training is not that of validation.
            left_out = {"validation", *(["temperature"] if validate and isinstance(part, AgentSampling) else [])}
            new = part.model_dump(exclude=left_out, exclude_none=True)
            if arguments := new.get("chat_template_kwargs"):
                new["chat_template_kwargs"] = {**given.get("chat_template_kwargs", {}), **arguments}
            given |= new
        return SamplingSettings.model_construct(**given)

    def team_options(self) -> TeamOptions:
        """Returns the settings of `Team`."""
        own = self.candidates if isinstance(self.candidates, dict) else {"all": self.candidates}
        return TeamOptions(
            candidates=own.get("all", self.fewest_candidates),
            agent_candidates={agent: k for agent, k in own.items() if agent != "all"},
            alpha=self.alpha,
            local_weight=self.local_weight,
            selection=self.selection,
        )

    @property
    def critic_reads_as(self) -> list[str]:
        """The policies with whose tokens a critic's rows are written; none without a critic."""
        if self.critic is None:
            return []
        return self.learners if self.critic.policy is None else [self.critic.policy]

    @property
    def fewest_candidates(self) -> int:
        """The smallest K of an agent."""
        return min(self.candidates.values()) if isinstance(self.candidates, dict) else self.candidates

    @property
    def training_episodes(self) -> int:
        """Episodes per task in training."""
        return self.fewest_candidates if self.scheme == "parallel" else 1

    @property
    def reward_is_outcome(self) -> bool:
        """Whether candidates' own rewards train nothing."""
        if self.scheme == "branch":
            return self.branch is None or self.branch.score_weight == 0
        return self.scheme == "parallel" and self.episode_reward == "outcome"

    def split_size(self, env: Environment, split: Split) -> int:
        """Returns the number of tasks of `split` that the run uses."""
        wanted = self.train_tasks if split == "train" else self.val_tasks
        available = tasks_of(env, split)
        return wanted if available is None else min(wanted, available)
