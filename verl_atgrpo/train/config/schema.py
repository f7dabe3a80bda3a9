"""The schema of the `at_grpo:` section: keys, types and bounds; error messages and docs are generated from it."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from omegaconf import DictConfig, OmegaConf
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

from verl_atgrpo.files import place_of
from verl_atgrpo.play import registry
from verl_atgrpo.play.environment import Environment
from verl_atgrpo.play.environment_check import check_declared, tasks_of
from verl_atgrpo.play.types import EnvironmentConfigError, Selection, Split, TeamOptions
from verl_atgrpo.recipes import gone
from verl_atgrpo.train.config.kinds import Count, Seconds, Text, Weight, words
from verl_atgrpo.train.config.rules import SECTION as SECTION
from verl_atgrpo.train.config.rules import ConfigError as ConfigError
from verl_atgrpo.train.config.rules import check
from verl_atgrpo.train.config.section_rules import of_section
from verl_atgrpo.train.estimators.choice import resolve_spec
from verl_atgrpo.train.estimators.spec import EstimatorSpec

EXPANDED = "at_grpo_policies"
"""Key under which the driver stores every policy's resolved `actor_rollout_ref` for the trainer and the workers."""
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
Options = dict[str, Any]
"""A section with keys of verl, of an environment or of an estimator."""


class Section(BaseModel):
    """A section of the recipe. Refuses unknown keys and does not convert values."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class Lora(Section):
    """An adapter instead of full training: `at_grpo.policies.<name>.lora`."""

    rank: Annotated[int, Ge(1), Le(512)]
    """The adapter's rank: verl's `model.lora_rank`."""
    alpha: Count | None = None
    """verl's `model.lora_alpha`; null: the job's."""
    target_modules: str | list[str] | None = None
    """verl's `model.target_modules`; null: the job's."""


class PolicySettings(Section):
    """One block of `at_grpo.policies`: the policy's changes to the job's `actor_rollout_ref`."""

    model: Options = {}
    """Merged into `actor_rollout_ref.model`."""
    optim: Options = {}
    """Merged into `actor_rollout_ref.actor.optim`."""
    base: Name | None = None
    """A name of your own for a model that several policies share. They differ by their adapters, `lora` (a policy that
    is not trained has none), and their `optim`; their other blocks are equal. null: a model of its own."""
    lora: Annotated[Lora | None, BeforeValidator(lambda block: None if block == {} else block)] = None
    """`rank`, `alpha`, `target_modules`: an adapter instead of full training."""
    actor: Options = {}
    """Merged into `actor_rollout_ref.actor`."""
    rollout: Options = {}
    """Merged into `actor_rollout_ref.rollout`; sampling parameters are the job's, not a policy's."""
    trainable: bool = True
    """False: the policy answers but is not trained."""
    gpus: Annotated[int, Ge(1), Le(1024)] | None = None
    """Devices of its own on every node, with `placement: split`."""


class Answers(Section):
    """How an agent answers, in training or in validation; null: as the next wider setting says."""

    max_response_length: Count | None = None
    """Most tokens of an answer, at most `data.max_response_length`."""
    stop: list[Text] | None = None
    """Texts at which an answer ends; they are not in its text."""
    chat_template_kwargs: Options | None = None
    """Arguments of the chat template beside those of `data.apply_chat_template_kwargs`, such as
    `{enable_thinking: false}`."""
    system: Text | None = None
    """Text of a system message before all others, or of the first part of the environment's own."""


class ValidationAnswers(Answers):
    """How an agent answers in validation and evaluation, where it differs: its other keys, and these."""

    temperature: Annotated[float, Ge(0), Le(100)] | None = None
    """null: `actor_rollout_ref.rollout.val_kwargs.temperature`."""
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    """null: `actor_rollout_ref.rollout.val_kwargs.top_p`."""
    top_k: Annotated[int, Ge(-1), Le(1_000_000_000)] | None = None
    """-1 for all tokens. null: `actor_rollout_ref.rollout.val_kwargs.top_k`."""


class AgentAnswers(Answers):
    """One agent of `at_grpo.sampling`."""

    temperature: Annotated[float, Gt(0), Le(100)] | None = None
    """null: `actor_rollout_ref.rollout.temperature`. Log-probs are computed at the temperature of each row."""
    validation: ValidationAnswers | None = None
    """Changes in validation and evaluation, where `temperature` is `val_kwargs`' unless it is here."""


class GroupFilter(Section):
    """Drops groups without signal (every advantage is 0), and plays further tasks in their place."""

    min_groups: Count | None = None
    """Groups with signal that a step needs, over all trainable policies; tasks are added until it has them. null: no
    tasks are added."""
    max_tasks: Tasks | None = None
    """Maximum number of tasks of a step, including those of `data.train_batch_size`."""


class BranchSettings(Section):
    """Rewards by what becomes of an episode after each candidate: `at_grpo.branch`, with `scheme: branch`.

    K is the decision's (`Decision.k`).
    """

    at: Literal["first", "random", "every"] | dict[str, Index] = "every"
    """Where an episode branches: at its `first` decision, a `random` one (all equally likely), `every` one, or
    `{<agent>: <n>}`: at these agents' n-th decisions, counted from 0."""
    continuations: Annotated[int, Ge(1), Le(4096)] = 1
    """Continuations of every candidate; its reward is the mean of their team rewards."""
    nested: bool = False
    """Whether continuations branch as well: a candidate's value is then the mean of the values of the next group's,
    down to the ends of episodes (MALT, arXiv 2412.01928). A group counts 1 / (K * continuations) for each above it."""
    score_weight: Weight = 0.0
    """Weight of a candidate's own mixed score beside the mean of its continuations; 0: scores are not called."""
    min_tokens: Annotated[int, Ge(0)] = 0
    """Fewest tokens of the prompt of a decision to branch at."""
    max_tokens: Count | None = None
    """Most tokens of the prompt of a decision to branch at; null: no limit."""


class RecordSettings(Section):
    """Episodes recorded for `verl-atgrpo report`."""

    train_tasks: Annotated[int, Ge(0), Le(1_000_000)] = 4
    """Tasks of every step whose episodes are recorded: those with the lowest indices in the batch."""
    val_tasks: Annotated[int, Ge(0), Le(1_000_000)] = 4
    """Tasks of every validation whose episodes are recorded: always the first ones."""
    max_megabytes: Annotated[float, Gt(0), Le(1_000_000)] = 64.0
    """Disk space for episodes (MB); the oldest are deleted first. Metrics are not counted and never deleted."""


class AtGrpoConfig(Section):
    """The `at_grpo:` section of a recipe."""

    environment: Options
    """`name` (registered, or "module:Class") and the environment's own options."""
    agents: dict[str, str] = {"all": SHARED}
    """Agent -> policy. `all: shared` trains one policy for every agent."""
    val_agents: dict[str, str] | None = None
    """Agent -> policy in validation, where it differs from training: swapped roles."""
    sampling: dict[str, AgentAnswers] | None = None
    """Agent, or `all` -> how it answers (docs/policies.md); an agent's own settings come before those of `all`."""
    policies: dict[Name, PolicySettings | None] | None = None
    """Policy -> its changes to `actor_rollout_ref`. null: one policy, `shared`."""
    placement: Literal["colocated", "split"] = "colocated"
    """`colocated`: all policies share all devices, in turns. `split`: each has `gpus` of its own on every node."""
    mode: Mode = "sync"
    """`sync`: a step updates once all its tasks have finished. `colocate_async`: it updates once enough tasks have
    finished, and the others continue with the new weights. `separate_async`: servers have devices of their own and
    keep sampling during the update (see docs/async.md)."""
    prefix_tree: Literal["auto"] | bool = "auto"
    """Whether log-probs and updates run every shared token once (docs/prefix_trees.md). `auto`: where a comparison
    with rows one by one agrees at the start."""
    dither: bool = True
    """Whether weights that are trained start at a random place among those that the servers' dtype rounds to the same
    number. In bfloat16 and float16 small updates reach the servers so; in float32 it changes nothing (see
    docs/precision.md)."""
    candidates: Candidates | dict[str, Candidates] = 4
    """K: candidates at every decision (`tree`) or branch point (`branch`), or episodes of every task (`parallel`). Or
    `{all: 4, <agent>: 8}`, a K for each agent (not with `parallel`)."""
    alpha: Weight = 1.0
    """Weight of the team part in the mixed reward alpha * team + local_weight * local (`tree`, or with
    `episode_reward: scores` or `own`, or `branch.score_weight`)."""
    local_weight: Weight = 1.0
    """Weight of the local part: 1 as in the paper; 0 leaves only the team part."""
    scheme: Literal["tree", "parallel", "branch"] = "tree"
    """`tree`: AT-GRPO. `parallel`: independent episodes, each with one reward for all its rows. `branch`: candidates
    are rewarded by what becomes of the episode after them, for teams without scores (see docs/branching.md)."""
    branch: BranchSettings | None = None
    """Where episodes branch, with `scheme: branch`."""
    episode_reward: Literal["outcome", "scores", "own"] = "outcome"
    """The reward of an episode's rows (`parallel`): its `outcome`'s team reward, the sum of its answers' mixed
    `scores` (which pays for long episodes), or every row's `own` mixed score."""
    selection: Selection = "greedy"
    """Which candidate is committed (`tree`)."""
    estimator: str | Options = "at_grpo"
    """A preset, `{preset: ..., <field>: ..., agents: {<agent>: ...}}`, or `{name: ..., <field>: ...}`: see
    docs/estimators.md."""
    group_filter: GroupFilter | None = None
    """Drops comparison groups without signal: `{}`, or `{min_groups: ..., max_tasks: ...}` to play further tasks in
    their place."""
    seed: int = 0
    """Seeds of samples derive from it, the task, the step, the agent, the turn and the candidate."""
    train_tasks: Tasks = 4096
    """Tasks in an epoch, for environments that generate tasks without end."""
    val_tasks: Tasks = 200
    """Tasks of the validation split, for environments that generate tasks without end."""
    allow_overlap: bool = False
    """Accept validation tasks that are also training tasks, or near duplicates of them by their texts."""
    max_bad_rows: Annotated[float, Ge(0), Le(1)] = 0.25
    """Largest share of bad rows in a sample of 32 of each split that is graded at the start: their own solution fails,
    the empty reply passes, or their answer cannot be verified. `verl-atgrpo data check` grades all rows."""
    request_timeout: Seconds = 600.0
    """Seconds that a server has for a candidate, or for the rest of an interrupted one."""
    request_retries: Retries = 2
    """Retries on another replica for a candidate that timed out or whose server died; then its episode fails."""
    max_failed_episodes: Count = 64
    """The run stops after more failed episodes than this in one step: the engine or a task is defective."""
    restart_servers: Retries = 3
    """Restarts of dead servers per policy and run, each before the next weight sync; 0: never."""
    record: RecordSettings | None = RecordSettings()
    """Episodes recorded for `verl-atgrpo report`; null: none."""

    @classmethod
    def from_config(cls, config: DictConfig) -> AtGrpoConfig:
        """Parses the section of a job's configuration, or of its `data` part; raises ConfigError."""
        section = OmegaConf.select(config, SECTION)
        return cls.from_mapping(
            OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
        )

    @classmethod
    def from_mapping(cls, section: Any) -> AtGrpoConfig:
        """Parses the section; raises ConfigError for unknown keys and refused values."""
        if not section:
            raise ConfigError(f"{SECTION}: the section is missing; trainer.v1.trainer_mode=at_grpo needs it")
        if not isinstance(section, Mapping):
            raise ConfigError(f"{SECTION}={section!r}: a section, with {', '.join(cls.model_fields)}")
        try:
            settings = cls.model_validate(dict(section))
        except ValidationError as error:
            raise ConfigError(one_line(error, cls, SECTION, section)) from None
        check(of_section(settings), f"{SECTION}.")
        return settings

    @functools.cached_property
    def spec(self) -> EstimatorSpec:
        """The estimator's specification; raises ConfigError for an invalid one."""
        try:
            return resolve_spec(self.estimator)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def bases(self) -> dict[str, list[str]]:
        """Returns the policies that share a model, by the first of them that is trained; others are alone.

        In the order of the policies, as everywhere.
        """
        policies = self.policy_settings()
        found: dict[str, list[str]] = {}
        for name, policy in policies.items():
            found.setdefault(f"own {name}" if policy.base is None else f"base {policy.base}", []).append(name)
        return {
            next((name for name in names if policies[name].trainable), names[0]): names for names in found.values()
        }

    def adapter_number(self, policy: str) -> int | None:
        """Returns the number by which the servers of a shared base know a policy's adapter; None without a base."""
        if self.policy_settings()[policy].base is None:
            return None
        return 1 + next(names.index(policy) for names in self.bases().values() if policy in names)

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
        return {agent: self.agents.get(agent, self.agents.get("all", "")) for agent in env.agents}

    def validation_policies_of(self, env: Environment) -> dict[str, str]:
        """Returns agent -> policy in validation: that of training, updated with `val_agents`."""
        given = self.val_agents or {}
        return {agent: given.get(agent, given.get("all", policy)) for agent, policy in self.policies_of(env).items()}

    def answers_of(self, agent: str, validate: bool) -> ValidationAnswers:
        """Returns how an agent answers: `all`, `all.validation`, its own, its own `validation`, each before the last.

        What none of them says is null, and as the rest of the job says.
        """
        parts: list[Answers] = []
        for block in ((self.sampling or {}).get(name) for name in ("all", agent)):
            if block is not None:
                parts += [block] if block.validation is None or not validate else [block, block.validation]
        given: dict[str, Any] = {}
        for part in parts:
            # The temperature of training is not that of validation.
            left_out = {"validation", "temperature"} if validate and isinstance(part, AgentAnswers) else {"validation"}
            new = part.model_dump(exclude=left_out, exclude_none=True)
            if arguments := new.get("chat_template_kwargs"):
                new["chat_template_kwargs"] = {**given.get("chat_template_kwargs", {}), **arguments}
            given |= new
        return ValidationAnswers.model_construct(**given)

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


# ---------------------------------------------------------------------- messages and docs from types and bounds


def one_line(error: ValidationError, section: type[Section], prefix: str, value: Mapping[str, Any]) -> str:
    """Returns the first error that pydantic found in a value: key, value, and what is accepted."""
    # Unknown keys first: one may be a misspelt required key.
    first = min(error.errors(include_url=False), key=lambda found: found["type"] != "extra_forbidden")
    place = place_of(first["loc"], value)
    key = ".".join([prefix, *place])
    if first["type"] == "missing":
        place.append(str(first["loc"][-1]))
        return f"{'.'.join([prefix, *place])} is missing: {words(_annotation_at(section, place))}"
    if first["type"] == "extra_forbidden":
        if (line := gone.of_key(key)) is not None:
            return line
        known = _only(_annotation_at(section, place[:-1])).model_fields
        return f"{key} is not a known key: use one of {', '.join(known)}"
    if first["type"] == "value_error":
        return f"{key}: {first['ctx']['error']}"
    return f"{key}={first['input']!r}: {words(_annotation_at(section, place))}"


def _annotation_at(section: type[Section], place: list[str]) -> Any:
    hint: Any = section
    for part in place:
        hint = _only(hint)
        if isinstance(hint, type) and issubclass(hint, Section):
            hint = hint.model_fields[part].rebuild_annotation()
        else:
            hint = (typing.get_args(hint) or (Any,))[-1]
    return hint


def _only(hint: Any) -> Any:
    """Returns a type without `| None` and `Annotated`."""
    if typing.get_origin(hint) is Annotated:
        return _only(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return _only(next(part for part in typing.get_args(hint) if part is not type(None)))
    return hint
