"""Turns a recipe and the command's options into the plan of an evaluation: tasks, agents' policies, settings."""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_atgrpo import platform_choice
from verl_atgrpo.lab.evaluation.engine import engine_args
from verl_atgrpo.lab.evaluation.results import MAX_EPISODES
from verl_atgrpo.lab.evaluation.sources import Source, assignments, of_checkpoint, parse, weights_digest
from verl_atgrpo.lab.export import Adapter
from verl_atgrpo.lab.report import counted
from verl_atgrpo.play.environment import Environment
from verl_atgrpo.play.environment_check import tasks_of
from verl_atgrpo.play.remote import RemoteModel
from verl_atgrpo.play.user_code import asking
from verl_atgrpo.recipes import compose, readable
from verl_atgrpo.train.config import check
from verl_atgrpo.train.config.job import Job, Policy
from verl_atgrpo.train.config.job_rules import of_agent_sampling, of_assignments, of_parts_validated, of_sampling
from verl_atgrpo.train.config.machine_rules import of_cpu_prefill
from verl_atgrpo.train.config.policies import config_of_policy, expand_policies
from verl_atgrpo.train.config.policy_rules import of_memory, of_room, of_temperatures
from verl_atgrpo.train.config.schema import SamplingSettings
from verl_atgrpo.train.config.section import read_section
from verl_atgrpo.train.config.verl_keys import check_keys, check_types
from verl_atgrpo.train.config.view import View


@dataclass(frozen=True)
class Options:
    """The command's options, by the names that its parser gives them and explains; None for what the recipe says."""

    config_name: str
    overrides: Sequence[str] = ()
    config_dir: Path | None = None
    episodes: int | None = None
    tasks: int | None = None
    seeds: Sequence[int] | None = None
    policies: Sequence[str] = ()
    """`NAME=SOURCE`."""
    agents: Sequence[str] = ()
    """`AGENT=POLICY` or `AGENT=SOURCE`."""
    checkpoint: Path | None = None
    versus: str | None = None


@dataclass(frozen=True)
class Player:
    """A policy of the evaluation."""

    source: Source
    engine: dict[str, Any] | None
    """vLLM's arguments; None behind an endpoint."""
    model: DictConfig | None
    """verl's `model` section with the source's path; None behind an endpoint."""
    tool_format: str = ""
    """`rollout.multi_turn.format`, how the model calls tools; empty behind an endpoint."""
    adapter: dict[str, Any] | None = None
    """vLLM's arguments of a LoRA request, if the source is an adapter; equal engines have different ones."""


@dataclass(frozen=True)
class Plan:
    """Everything an evaluation needs."""

    environment: Environment
    agents: dict[str, str]
    """Agent -> player."""
    versus: dict[str, str]
    """The same where the agent is an opponent; empty without another source for them."""
    players: dict[str, Player]
    tasks: int
    seeds: list[int]
    episodes: int
    sampling: dict[str, Any]
    """Sampling parameters of agents without their own."""
    agent_sampling: dict[str, SamplingSettings]
    """Agent -> what it has of its own."""
    max_prompt_length: int
    max_response_length: int
    chat_template_kwargs: dict[str, Any]
    request_timeout: float
    max_failed: int
    header: dict[str, Any] = field(repr=False)
    """Everything that the distribution of episodes depends on; a result file has exactly one header."""


def make(options: Options) -> Plan:
    """Returns the plan for a recipe and options; raises ValueError if they are invalid."""
    with readable(options.config_name, options.config_dir):
        config = compose(options.config_name, options.overrides, options.config_dir)
        settings = read_section(config)
        view = View(config)
        check_types(view)
        check_keys(view)
        training = Job(view, settings)
        check(of_sampling(training))
        expand_policies(config, settings)
        rollout, data = config.actor_rollout_ref.rollout, config.data
        check(of_assignments(training))
        check(of_agent_sampling(training))
        check(itertools.chain.from_iterable(map(of_temperatures, training.policies.values())))
        tasks, seeds, episodes = _amounts(options, training)
        opponents = set() if options.versus is None else _opponents(training, tasks)
        agents, versus, players = _players(training, options, opponents)
        agent_sampling = {agent: settings.sampling_of(agent, validate=True) for agent in agents}
        own = {agent: given for agent, one in agent_sampling.items() if (given := one.model_dump(exclude_none=True))}
        sampling = {key: rollout.val_kwargs[key] for key in ("temperature", "top_p", "top_k")}
        if rollout.ignore_eos:
            sampling["ignore_eos"] = True
        lengths = {key: int(data[key]) for key in ("max_prompt_length", "max_response_length")}
        template = OmegaConf.to_container(data.get("apply_chat_template_kwargs") or OmegaConf.create(), resolve=True)
        assert isinstance(template, dict)
        header = {
            "recipe": options.config_name,
            "environment": settings.environment,
            "agents": agents,
            "players": {name: _described(player) for name, player in players.items()},
            "sampling": sampling,
            **lengths,
            "chat_template_kwargs": template,
            **({"answers": own} if own else {}),
            **({"versus": versus} if versus else {}),
            "versions": _versions(players),
        }
        return Plan(
            environment=training.env,
            agents=agents,
            versus=versus,
            players=players,
            tasks=tasks,
            seeds=seeds,
            episodes=episodes,
            sampling=sampling,
            agent_sampling=agent_sampling,
            **lengths,
            chat_template_kwargs={str(key): value for key, value in template.items()},
            request_timeout=settings.request_timeout,
            max_failed=settings.max_failed_episodes,
            header=header,
        )


def _amounts(options: Options, job: Job) -> tuple[int, list[int], int]:
    """Returns the number of tasks, the seeds and the episodes of each; raises ValueError for what cannot be."""
    for option, number in (("--tasks", options.tasks), ("--episodes", options.episodes)):
        if number is not None and number < 1:
            raise ValueError(f"{option} {number}: at least 1")
    available, tasks = tasks_of(job.env, "val"), options.tasks or job.settings.split_size(job.env, "val")
    if available is not None and tasks > available:
        raise ValueError(f"--tasks {tasks}: the environment has {available} validation tasks")
    seeds = [job.settings.seed] if options.seeds is None else list(options.seeds)
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds {' '.join(map(str, seeds))}: a seed is given twice")
    episodes = options.episodes or int(job.rollout.val_kwargs.n)
    if (total := tasks * len(seeds) * episodes) > MAX_EPISODES:
        raise ValueError(
            f"--tasks {tasks} with {counted(len(seeds), 'seed')} and --episodes {episodes}: {total:,} episodes, a "
            f"result file holds at most {MAX_EPISODES:,}; lower --tasks, --seeds or --episodes"
        )
    if options.tasks is None:
        check(of_parts_validated(job))
    return tasks, seeds, episodes


def _opponents(job: Job, tasks: int) -> set[str]:
    """Returns the agents that are an opponent in validation; raises ValueError if there are none in the first tasks.

    Of all tasks, so that a result file of a few can be extended.
    """
    every = range(max(tasks, job.settings.split_size(job.env, "val")))
    with asking(job.settings.environment["name"], "task('val', ...) or its opponents"):
        found = [job.env.opponents(job.env.task("val", index)) for index in every]
    if not any(found[:tasks]):
        raise ValueError(
            f"--versus has no effect: none of the {tasks} validation tasks of {job.name!r} has an opponent "
            "(Environment.opponents); with tic_tac_toe and connect_four set at_grpo.environment.against=[self]"
        )
    return {agent for opponents in found for agent in opponents}


def _players(
    training: Job, options: Options, opponents: Collection[str]
) -> tuple[dict[str, str], dict[str, str], dict[str, Player]]:
    """Returns agent -> name of its player, the same for those that are opponents, and name -> player."""
    policies, environment = training.settings.policy_settings(), training.env
    trainable = {name: policy.trainable for name, policy in policies.items()}
    saved = {} if options.checkpoint is None else of_checkpoint(options.checkpoint, trainable)
    given = assignments(options.policies, "--policy", list(policies), "policy")
    sources: dict[str, Source] = {**saved, **{name: parse(text) for name, text in given.items()}}
    # Player -> the policy whose section configures its serving.
    agents = training.validation_agents
    sections = {name: name for name in policies}
    for agent, text in assignments(options.agents, "--agent", environment.agents, "agent").items():
        if text in policies:
            agents[agent] = text
            continue
        name = f"{agent}={text.partition('#')[0]}"
        sources[name], sections[name] = parse(text), agents[agent]
        agents[agent] = name
    for name in given:
        if name not in agents.values():
            raise ValueError(f"--policy {name}=... has no effect: no agent has the policy {name!r}")
    if saved and not ({*saved} - {*given}) & {*agents.values()}:
        raise ValueError(f"--checkpoint {options.checkpoint} has no effect: all agents have --policy or --agent")
    versus: dict[str, str] = {}
    if options.versus is not None:
        other = parse(options.versus)
        # Each with the settings of the policy in whose place it answers.
        for agent, name in training.validation_agents.items():
            if agent not in opponents:
                continue
            versus[agent] = f"versus {name}={options.versus.partition('#')[0]}"
            sources[versus[agent]], sections[versus[agent]] = other, name
    names = sorted({*agents.values(), *versus.values()})
    players = _numbered({name: _player(training.policies[sections[name]], sources.get(name)) for name in names})
    _check_memory(players)
    return agents, versus, players


def _numbered(players: Mapping[str, Player]) -> dict[str, Player]:
    """Returns players in which engines have room for all their adapters, and these have numbers."""
    made = dict(players)
    for engine in [player.engine for player in players.values() if isinstance(player.source, Adapter)]:
        same = {name: player.source for name, player in players.items() if player.engine == engine}
        ranks = [source.rank for source in same.values() if isinstance(source, Adapter)]
        shared = {**(engine or {}), "max_loras": len(same), "max_lora_rank": max(ranks)}
        for number, (name, source) in enumerate(same.items(), 1):
            adapter = {"lora_name": name, "lora_int_id": number, "lora_path": str(Path(str(source)).resolve())}
            made[name] = replace(players[name], engine=shared, adapter=adapter)
        # The base itself, too; but on the CPU a request without an adapter comes out as another adapter's.
        plain = {key: value for key, value in (engine or {}).items() if key != "enable_lora"}
        for name, player in players.items():
            if player.engine == plain and not platform_choice.wants_cpu():
                made[name] = replace(player, engine=shared)
    return made


def _check_base(key: str, adapter: Adapter, path: str) -> None:
    """Raises ValueError if an adapter's base is there and is not the recipe's model."""
    trained_on = Path(adapter.base)
    moved = not adapter.base or (trained_on.is_absolute() and not trained_on.is_dir())
    if not moved and trained_on.resolve() != Path(path).resolve():
        raise ValueError(
            f"{adapter}: the adapter was trained on {adapter.base}, and {key}.model.path={path}; set that to its base"
        )


def _player(trained: Policy, source: Source | None) -> Player:
    key, section = trained.key, trained.name
    job = config_of_policy(trained.job.config, section)
    check_keys(View(job), key)
    policy = job.actor_rollout_ref
    if source is None:
        if policy.model.get("lora_adapter_path"):
            raise ValueError(
                f"{key}.model.lora_adapter_path={policy.model.lora_adapter_path}: an evaluation needs a whole model; "
                f"merge the adapter and name the result with --policy {section}=FOLDER"
            )
        source = parse(str(policy.model.path))
    elif isinstance(source, str):
        with open_dict(policy.model):
            # Other settings of the model are kept, except paths to parts of the old one.
            policy.model.update(path=source, tokenizer_path=None, hf_config_path=None, lora_adapter_path=None)
    if isinstance(source, RemoteModel):
        return Player(source, None, None)
    path = str(policy.model.path)  # the recipe's, also with an adapter; or the given model's
    if isinstance(source, Adapter):
        _check_base(key, source, path)
    if platform_choice.wants_cpu():
        check(of_cpu_prefill(key, policy.rollout))
    check(of_room(trained))
    engine = engine_args(key, path, policy)
    if isinstance(source, Adapter):
        engine["enable_lora"] = True
    return Player(source, engine, policy.model, policy.rollout.multi_turn.format)


def _check_memory(players: Mapping[str, Player]) -> None:
    """Raises ConfigError if the engines, which share the devices, request more memory than there is."""
    engines: dict[str, dict[str, Any]] = {}
    for name, player in players.items():
        if player.engine is not None and player.engine not in engines.values():
            engines[name] = player.engine
    shares = {name: float(engine["gpu_memory_utilization"]) for name, engine in engines.items()}
    check(of_memory("an evaluation", shares, "lower them"))


_OF_THE_MACHINE = (
    *("model", "worker_extension_cls", "disable_log_stats", "trust_remote_code", "max_num_seqs"),
    *("max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching", "enforce_eager"),
    *("gpu_memory_utilization", "kv_cache_memory_bytes", "tensor_parallel_size", "data_parallel_size", "block_size"),
)
"""Engine arguments that the model's answers do not depend on, but for rounding."""
_OF_THE_MODEL = ("custom_chat_template", "override_config", "tokenizer_path", "hf_config_path", "external_lib")


def _described(player: Player) -> dict[str, Any]:
    """Returns what a player's answers depend on, without memory and number of devices."""
    described: dict[str, Any] = {"source": str(player.source)}
    if not isinstance(player.source, RemoteModel) and player.engine is not None:
        described["weights"] = weights_digest(str(player.source))
        if isinstance(player.source, Adapter):
            described["base"] = weights_digest(player.engine["model"])
        described |= {name: value for name, value in player.engine.items() if name not in _OF_THE_MACHINE}
        model = OmegaConf.to_container(player.model or OmegaConf.create(), resolve=True)
        assert isinstance(model, dict)
        described["model"] = {name: model.get(name) for name in _OF_THE_MODEL if model.get(name)}
        if model.get("tokenizer_path"):
            described["tokenizer"] = weights_digest(model["tokenizer_path"])
        described["tool_format"] = player.tool_format
    return described


def _versions(players: Mapping[str, Player]) -> dict[str, str]:
    local = any(player.engine is not None for player in players.values())
    found = dict.fromkeys(("verl-atgrpo", "vllm") if local else ("verl-atgrpo",), "unknown")
    for name in found:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
