"""Rules of a job: its keys against each other, its environment, its agents and its tasks."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_atgrpo.play import contamination, data_check
from verl_atgrpo.play.curriculum import Curriculum
from verl_atgrpo.play.environment import Environment
from verl_atgrpo.play.mixture import Mixture
from verl_atgrpo.play.types import Split, names_of, part_of
from verl_atgrpo.play.user_code import asking
from verl_atgrpo.train.config.job import Job
from verl_atgrpo.train.config.schema import AtGrpoConfig, CriticSettings
from verl_atgrpo.train.config.verl_key_table import LOGGERS

logger = logging.getLogger(__name__)

_TRACERS = ("mlflow", "weave", "trackio")
_ROLLOUT = "actor_rollout_ref.rollout"
_OPPONENTS_ASKED = 64
"""Training tasks that are asked for their opponents."""


def loggers(trainer: Any) -> list[Any]:
    """Returns the names in `trainer.logger`."""
    return [trainer.logger] if isinstance(trainer.logger, str) else list(trainer.logger)


def of_loggers(job: Job) -> Iterator[str]:
    """Loggers of verl's whose package is not installed."""
    for name in loggers(job.trainer):
        if (module := LOGGERS[name]) is not None and importlib.util.find_spec(module) is None:
            yield f"trainer.logger={name}: its package is not installed: pip install {module}, or leave it out"


def of_tables(job: Job) -> Iterator[str]:
    """A table of validations that no tracker shows, or without records to show."""
    if not (most := job.trainer.log_val_generations):
        return
    key = f"trainer.log_val_generations={most} has no effect"
    if not any(LOGGERS[name] for name in loggers(job.trainer)):
        trackers = ", ".join(name for name, module in LOGGERS.items() if module)
        yield f"{key} without a tracker that has tables: add one of {trackers} to trainer.logger, or set this to 0"
    if (record := job.settings.record) is None or not record.val_tasks:
        yield f"{key} without records: set at_grpo.record.val_tasks to 1 or more, or this to 0"


def of_ray(job: Job) -> Iterator[str]:
    """Arguments that Ray's `init` does not have."""
    import ray

    known = inspect.signature(ray.init).parameters
    for name, value in (OmegaConf.select(job.config, "ray_kwargs.ray_init") or {}).items():
        if name not in known and not str(name).startswith("_"):  # Ray's own for tests
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f", or did you mean {close[0]}?" if close else ""
            yield f"ray_kwargs.ray_init.{name}={value}: ray.init has no such argument; remove it{hint}"


def of_traces(job: Job) -> Iterator[str]:
    """Trace backends that do not exist or are not installed, or options without one."""
    key, trace, choices = f"{_ROLLOUT}.trace", job.rollout.trace, ", ".join(_TRACERS)
    if trace.backend is None:
        for name in ("token2text", "max_samples_per_step_per_worker"):
            if trace.get(name):
                yield f"{key}.{name}={trace[name]} has no effect without {key}.backend: set that to one of {choices}"
    elif trace.backend not in _TRACERS:
        yield f"{key}.backend={trace.backend}: use one of {choices}, or null"
    elif importlib.util.find_spec(trace.backend) is None:
        yield f"{key}.backend={trace.backend}: it is not installed, pip install {trace.backend}"


def of_sampling(job: Job) -> Iterator[str]:
    """Sampling that verl's V1 rollout ignores, or that makes log-probs and samples disagree."""
    rollout, validation = job.rollout, job.rollout.val_kwargs
    if not validation.do_sample and validation.temperature:
        yield (
            f"{_ROLLOUT}.val_kwargs.do_sample=false has no effect beside temperature={validation.temperature}: set "
            f"{_ROLLOUT}.val_kwargs.temperature to 0 for greedy answers, or do_sample to true"
        )
    if rollout.temperature != 1 and rollout.logprobs_mode != "processed_logprobs":
        yield (
            f"{_ROLLOUT}.logprobs_mode={rollout.logprobs_mode}: with temperature={rollout.temperature} the server's "
            "log-probs would not be those that were sampled from, set it to processed_logprobs"
        )


def of_the_start(job: Job) -> Iterator[str]:
    """Runs that would validate nothing, or start from what is no checkpoint."""
    trainer = job.trainer
    if trainer.val_only and not trainer.val_before_train:
        yield "trainer.val_only=true has no effect beside trainer.val_before_train=false: set that to true"
    folder = Path(str(trainer.resume_from_path))
    is_checkpoint = re.fullmatch(r"global_step_\d+", folder.name) and folder.is_dir()
    if trainer.resume_mode == "resume_path" and not is_checkpoint:
        yield (
            f"trainer.resume_from_path={trainer.resume_from_path}: name a checkpoint's folder, "
            "<trainer.default_local_dir>/global_step_<n>"
        )


# ---------------------------------------------------------------------- agents; from here on the environment is made


def of_assignments(job: Job) -> Iterator[str]:
    """Agents without a policy of this job, and policies without an agent."""
    yield from _of_mapping(job, "agents", job.settings.agents, job.agents)
    critic, opponents = job.settings.critic, job.settings.opponents
    used = {*job.agents.values(), *(opponents.others if opponents else ()), critic.policy if critic else None}
    for policy in job.policies:
        if policy not in used:
            yield f"at_grpo.policies.{policy} has no agent: give it one in at_grpo.agents, or remove it"
    yield from _of_mapping(job, "val_agents", job.settings.val_agents or {}, job.validation_agents)


def _of_mapping(job: Job, key: str, given: Mapping[str, str], policies: Mapping[str, str]) -> Iterator[str]:
    for agent in given:
        if agent not in ("all", *job.named):
            yield f"at_grpo.{key}.{agent} is not an agent of {job.name!r}: it has {job.known} (or use all)"
    first = next(iter(job.policies))
    for agent, policy in policies.items():
        if not policy:
            yield f"at_grpo.{key} has no policy for {agent!r}: add {agent}: {first}, or all: {first}"
        if policy not in job.policies:
            known = ", ".join(job.policies)
            yield f"at_grpo.{key}.{agent}={policy!r} is not a policy of this job: it has {known} (at_grpo.policies)"


def of_agents(job: Job) -> Iterator[str]:
    """What the section says of agents that are not there or not trained, or leaves unsaid of others."""
    spec, branch = job.settings.spec, job.settings.branch
    candidates: Any = job.settings.candidates if isinstance(job.settings.candidates, dict) else {}
    points = branch.at if branch is not None and isinstance(branch.at, dict) else {}
    for key, named in (("estimator.agents", spec.agents), ("branch.at", points), ("candidates", candidates)):
        for agent in named:
            known = job.env.agents if key == "branch.at" else job.named
            if agent not in known and (key, agent) != ("candidates", "all"):
                yield f"at_grpo.{key}.{agent} is not an agent of {job.name!r}: it has {job.known}"
    for name in spec.agents:
        policies = [job.agents[agent] for agent in job.env.agents if name in names_of(agent)]
        if not any(job.policies[policy].settings.trainable for policy in policies):
            yield f"at_grpo.estimator.agents.{name} has no effect: its policy {policies[0]!r} is frozen; remove it"
    yield from _of_candidates(job, candidates)
    if spec.main_agent not in (None, *job.env.agents):
        yield f"at_grpo.estimator.main_agent={spec.main_agent!r} is not an agent of {job.name!r}: it has {job.known}"
    if spec.main_agent is not None and len(job.env.agents) == 1:
        yield (
            f"at_grpo.estimator.sub_calls={spec.sub_calls} has no effect: {spec.main_agent!r} is the only agent of "
            f"{job.name!r}; use estimator: mas_grpo"
        )
    for agent in filter(job.plays_in_training, job.env.agents if candidates else ()):
        if not {*names_of(agent), "all"} & set(candidates):
            yield f"at_grpo.candidates has no number for {agent!r}: add {agent}: 4, or all: 4"


def _of_candidates(job: Job, candidates: Mapping[str, int]) -> Iterator[str]:
    followed: set[str] = set()
    unused: dict[str, str] = {}
    for agent in job.env.agents if candidates else ():
        names = names_of(agent)
        settings, own = job.settings.of_part(names[-1]), (job.settings.parts or {}).get(names[-1])
        points, by = settings.branch.at if settings.branch else None, names
        if own is not None and own.candidates is not None:
            by, why = (), f"at_grpo.parts.{names[-1]}.candidates is set; remove it"
        elif isinstance(points, Mapping) and agent not in points:
            by, why = (), "episodes do not branch at its decisions; add it to at_grpo.branch.at, or remove it"
        elif settings.scheme == "parallel":
            by, why = names[-1:], f"whole episodes are compared; set at_grpo.candidates.{names[-1]}"
        else:
            why = "each of its agents has a number of its own; remove it"
        followed |= set([name for name in by if name in candidates][:1])
        unused |= dict.fromkeys(names, why)
    for name in candidates:
        if name in unused and name not in followed:
            yield f"at_grpo.candidates.{name} has no effect: {unused[name]}"


def of_parts(job: Job) -> Iterator[str]:
    """Settings of parts that a mixture has not, or of agents that a part has not."""
    parts = job.env.parts if isinstance(job.env, Mixture) else {}
    for part, own in (job.settings.parts or {}).items():
        if part not in parts:
            has = f"it has {', '.join(parts)}" if parts else "only a mixture has parts"
            yield f"at_grpo.parts.{part} is not a part of {job.name!r}: {has}"
        if not own.model_fields_set:
            yield f"at_grpo.parts.{part} has no effect: it changes nothing; remove it"
        known = [agent for agent in job.env.agents if part in names_of(agent)]
        spec, points = job.settings.spec.parts.get(part), own.branch.at if own.branch else None
        named = {
            "branch.at": points if isinstance(points, Mapping) else (),
            "estimator.agents": spec.agents if spec else (),
            "estimator.main_agent": (spec.main_agent,) if spec and spec.main_agent else (),
        }
        for key, agents in named.items():
            for agent in agents:
                if agent not in known:
                    yield f"at_grpo.parts.{part}.{key}: {agent} is not an agent of it: it has {', '.join(known)}"


def of_critic(job: Job) -> Iterator[str]:
    """A critic of agents that are not there or not trained, or that cannot read what they do."""
    if (critic := job.settings.critic) is None:
        return
    trained = [agent for agent in job.env.agents if job.is_trained(agent)]
    scored = trained if critic.agents is None else critic.agents
    for agent in scored:
        if agent not in job.env.agents:
            yield f"at_grpo.critic.agents: {agent} is not an agent of {job.name!r}: it has {job.known}"
        elif agent not in trained:
            yield f"at_grpo.critic.agents: {agent} has a policy that is not trained, so a score has no effect"
        elif critic.policy is None:
            yield from _of_reader(job, job.agents[agent])
        elif job.policies[job.agents[agent]].settings.base != (base := job.policies[critic.policy].settings.base):
            other = f"{agent} has a policy on another base than the critic's, {base}, which would not read its tokens"
            yield f"at_grpo.critic.agents: {other}; name the agents that are on it"
    if critic.policy is not None:
        yield from _of_likelihood(job, critic.policy)
    for part in sorted({*map(part_of, scored)}):
        settings = job.settings.of_part(part)
        where = "at_grpo." if settings is job.settings else f"at_grpo.parts.{part}."
        yield from (f"{where}{message}" for message in _of_scored(settings, critic))
    if critic.warmup >= job.steps:
        yield f"at_grpo.critic.warmup={critic.warmup}: the run has {job.steps} steps, so it never scores; lower it"
    if not critic.hindsight and type(job.env).hindsight is Environment.hindsight:
        yield f"at_grpo.critic.hindsight=False has no effect: {job.name!r} says nothing in hindsight; remove it"


def _of_scored(one: AtGrpoConfig, critic: CriticSettings) -> Iterator[str]:
    """Settings of agents that are scored, of the section or of a part, in which scores have no effect or are wrong."""
    if critic.weight == 1 and one.episode_reward != "outcome":
        yield f"episode_reward={one.episode_reward!r} has no effect with critic.weight=1; lower that"
    if one.scheme != "parallel":
        whole = "a critic learns from whole episodes, of which here are parts; use scheme: parallel"
        yield f"scheme={one.scheme!r}: {whole}"
    specs, every = (one.spec, *one.spec.agents.values()), "but a critic scores every row; use estimator: dr_mas"
    if any(spec.unit != "row" for spec in specs):
        yield f"estimator={one.spec.name!r} has one reward for an episode, {every}"
    elif any(spec.discount != 1 for spec in specs):
        yield "estimator.discount: beside critic, scores would be discounted; lower critic.lam, or remove it"
    elif any(spec.step_weight for spec in specs):
        yield f"estimator={one.spec.name!r} discounts an outcome in its step term, {every}"
    elif any(getattr(spec, "decay", 1) != 1 for spec in specs):
        yield "estimator.decay: beside critic, scores are compared with what rewards were before; set it to 1"


def _of_reader(job: Job, name: str) -> Iterator[str]:
    """A policy whose base does not stay as it is, or shows no hidden states."""
    policy = job.policies[name]
    if not policy.model.lora_rank:
        yield (
            f"at_grpo.critic: policy {name!r} is trained as a whole, and a critic of kind value reads a base that "
            "stays as it is; train an adapter, for instance with actor_rollout_ref.model.lora_rank=16"
        )
    ulysses = "ulysses_sequence_parallel_size"
    for key, most in (("model.use_fused_kernels", 0), (f"actor.{ulysses}", 1), (f"actor.fsdp_config.{ulysses}", 1)):
        if (value := OmegaConf.select(policy.section, key)) and int(value) > most:
            yield f"{policy.key}.{key}={value}: a critic of kind value gets no hidden states then; remove it"


def _of_likelihood(job: Job, name: str) -> Iterator[str]:
    """A critic's policy that answers for an agent, or whose loss has more parts."""
    for key, policies in (("agents", job.agents), ("val_agents", job.validation_agents)):
        if name in policies.values():
            yield f"at_grpo.{key}: {name!r} is the critic, which answers for no agent; name another policy"
    for key in ("entropy_coeff", "use_kl_loss"):
        if value := job.policies[name].actor[key]:
            why = "adapters of one base share the loss, and a critic has no such term"
            yield f"actor_rollout_ref.actor.{key}={value}: {why}; set it to 0 or false"


def of_branch_points(job: Job) -> Iterator[str]:
    """Branch points that no episode has."""
    longest = job.data.max_prompt_length
    for where, settings in job.settings.each():
        if (branch := settings.branch) is None:
            continue
        key = f"at_grpo.{where}branch"
        if branch.min_tokens > longest:
            yield (
                f"{key}.min_tokens={branch.min_tokens}: no prompt has as many tokens with "
                f"data.max_prompt_length={longest}; lower it"
            )
        named = branch.at if isinstance(branch.at, Mapping) else {}
        for part in job.parts if named and not where else ():
            if part not in (job.settings.parts or {}) and not any(agent.startswith(f"{part}.") for agent in named):
                yield f"{key}.at names no agent of {part}, whose episodes would fail; name one, or set parts.{part}"
        for agent in named:
            if not job.is_trained(agent):
                why = f"the policy {job.agents[agent]!r} is not trained, so its decisions are no branch points"
                yield f"{key}.at.{agent}: {why}; remove it, or name an agent that is trained"


def of_agent_sampling(job: Job) -> Iterator[str]:
    """Settings of agents that are not there, and answers for which there is no room."""
    longest = job.data.max_response_length
    for agent, block in (job.settings.sampling or {}).items():
        key = f"at_grpo.sampling.{agent}"
        if agent not in ("all", *job.named):
            yield f"{key} is not an agent of {job.name!r}: it has {job.known} (or use all)"
        for where, answers in ((key, block), (f"{key}.validation", block.validation)):
            most = None if answers is None else answers.max_response_length
            if most is not None and most > longest:
                yield (
                    f"{where}.max_response_length={most}: more than data.max_response_length={longest}, for which "
                    "servers and micro-batches have room; raise that, or lower this"
                )


def of_opponents(job: Job) -> Iterator[str]:
    """Opponents of an environment that has none, or that are no agents, or all of them."""
    # Tasks of data may take long to make.
    tasks = 0 if type(job.env).opponents is Environment.opponents else min(job.tasks, _OPPONENTS_ASKED)
    with asking(job.name, "opponents of its first tasks"):
        found = [set(job.env.opponents(job.env.task("train", index))) for index in range(tasks)]
    for index, opponents in enumerate(found):
        # In a mixture those of the task's part.
        agents = {agent for agent in job.env.agents if part_of(agent) in {*map(part_of, opponents)}}
        if opponents and not opponents < agents:
            known = ", ".join(sorted(agents)) or job.known
            yield (
                f"at_grpo.environment.name={job.name!r}: the opponents of task ('train', {index}) are "
                f"{sorted(opponents)}: some of {known}, and not all, as one side is in training"
            )
        if opponents and not job.trainer.val_only and not any(job.is_trained(agent) for agent in agents - opponents):
            yield (
                f"at_grpo.agents: nothing is trained on task ('train', {index}), in which {sorted(opponents)} play "
                f"against {sorted(agents - opponents)}: give all agents the policy in training, and those that play "
                "against it another one by at_grpo.opponents.others"
            )
        played = job.settings.self_played
        if played is not None and (others := {job.agents[agent] for agent in opponents} - {played}):
            yield (
                f"at_grpo.opponents.past: in task ('train', {index}) {sorted(opponents)} answer with the policy "
                f"{sorted(others)[0]}, whose role past selves of {played!r} do not know; give both sides one policy, "
                "or set past: 0"
            )
    # In a mixture the first such task may come late.
    if job.settings.opponents is not None and not any(found) and not job.parts:
        yield (
            f"at_grpo.opponents has no effect: no agent of {job.name!r} plays against the others "
            "(Environment.opponents); remove it, or use an environment of two sides, such as tic_tac_toe"
        )


def of_schemes(job: Job) -> Iterator[str]:
    """Schemes that give an agent whose policy is trained no reward of its own."""
    # Own rewards of parallel episodes are scores, as in a tree.
    for agent in job.agents if not job.trainer.val_only else ():
        part = agent.partition(".")[0]
        settings = job.settings.of_part(part)
        own, scheme = settings.episode_reward == "own", settings.scheme
        accepted = job.env.schemes.get(agent)
        rewarded = {"tree", "own"} if own else {scheme}
        if accepted is None or rewarded & {*accepted}:
            continue
        if not job.is_trained(agent) or not job.plays_in_training(agent):
            continue
        key = "episode_reward=own" if own else f"scheme={scheme}"
        key = f"parts.{part}.{key}" if settings is not job.settings else key
        instead = f"{'outcome with scheme: ' if own else ''}{' or '.join(one for one in accepted if one != 'own')}"
        yield (
            f"at_grpo.{key} has no reward for {agent!r} of {job.name!r}: set it to {instead}, or give {agent} a "
            "policy with trainable: false"
        )


# ---------------------------------------------------------------------- tasks


def of_parts_validated(job: Job) -> Iterator[str]:
    """Fewer validation tasks than those of a mixture's parts, which come one after another."""
    validated, most = job.env.num_tasks("val"), job.settings.val_tasks
    if isinstance(job.env, Mixture) and validated is not None and validated > most:
        yield (
            f"at_grpo.val_tasks={most}: less than the {validated} of the parts, of which the last would be left out; "
            "raise it, or lower val_tasks of parts"
        )


def _warn_of_unplayed_tasks(job: Job) -> None:
    """Logs data that are not played: a quick run may want it so."""
    if (size := job.env.num_tasks("train")) is not None and size > job.tasks:
        note = "at_grpo.train_tasks=%d: only the first of the %d training tasks of %r are played; raise it to play all"
        logger.warning(note, job.tasks, size, job.name)
    parts = job.env.parts.items() if isinstance(job.env, Mixture) else ()
    places = [(f"environment.parts.{name}.val_tasks", part.environment, part.val_tasks) for name, part in parts]
    for key, env, tasks in places or [("val_tasks", job.env, job.settings.val_tasks)]:
        before = 0
        for name, size in env.data_sets("val").items():
            if tasks and before >= tasks and size:  # with 0 all are left out on purpose
                logger.warning("at_grpo.%s=%d: no task of %r is played, which begin at %d", key, tasks, name, before)
            before += size


def _warn_of_best_of_k(job: Job) -> None:
    """Logs that tasks or opponents are chosen by success which is not the policy's."""
    settings = job.settings
    followed = {
        "environment": isinstance(job.env, Curriculum) and "tasks follow",
        "task_order": settings.task_order != "shuffled" and "tasks follow",
        "opponents": settings.opponents is not None and "past selves and ratings follow",
    }
    if settings.scheme != "tree" or settings.selection != "greedy":
        return
    for key, follow in followed.items():
        if follow:
            logger.warning(
                "at_grpo.%s: %s the success of training's episodes, which go on from the best candidate and are "
                "solved far more often than the policy's own; set at_grpo.selection=first to follow the policy's",
                key,
                follow,
            )


def of_tasks(job: Job) -> Iterator[str]:
    """Fewer training tasks than a step plays, or none to validate on."""
    settings, batch, tasks = job.settings, job.data.train_batch_size, job.tasks
    if settings.task_order != "shuffled" and job.env.ordered:
        yield f"at_grpo.task_order={settings.task_order} has no effect: {job.name!r} orders its own tasks; remove it"
    elif settings.task_order != "shuffled" and not job.data.shuffle:
        yield f"data.shuffle=false has no effect with at_grpo.task_order={settings.task_order}; remove it"
    if tasks < batch and tasks == settings.train_tasks:
        yield f"at_grpo.train_tasks={tasks}: less than data.train_batch_size={batch}"
    if tasks < batch:
        lower = "lower it (and actor.ppo_mini_batch_size)"
        yield f"data.train_batch_size={batch}: {job.name!r} has only {tasks} training tasks; {lower}"
    if not settings.split_size(job.env, "val"):
        yield f"at_grpo.environment.name={job.name!r} has no validation tasks"
    _warn_of_unplayed_tasks(job)
    _warn_of_best_of_k(job)
    most = settings.group_filter.max_tasks if settings.group_filter else None
    key = f"at_grpo.group_filter.max_tasks={most}"
    if most is not None and most <= batch:
        higher = "set it higher, or remove it with min_groups"
        yield f"{key}: the step plays data.train_batch_size={batch} tasks anyway; {higher}"
    if most is not None and most > tasks:
        yield (
            f"{key}: there are {tasks} training tasks, and one played twice in a step gives the same rows twice; "
            "lower it, or raise at_grpo.train_tasks"
        )


def of_steps(job: Job) -> Iterator[str]:
    """Epochs that end before the last step, which would not be saved, and steps that TransferQueue cannot hold.

    Episodes may take more decisions than one, whose number is not known here: a run stops at the first row that does
    not fit.
    """
    trainer, batch, critic = job.trainer, job.data.train_batch_size, job.settings.critic
    k = min(settings.fewest_candidates for _, settings in job.settings.each())
    steps = job.steps_of_epochs
    if trainer.total_training_steps is not None and trainer.total_training_steps > steps and not trainer.val_only:
        yield (
            f"trainer.total_training_steps={trainer.total_training_steps}: {trainer.total_epochs} epochs of "
            f"{job.tasks} tasks, data.train_batch_size={batch} a step, are {steps} steps; raise trainer.total_epochs, "
            "or lower it"
        )
    backend, group_filter = OmegaConf.select(job.config, "transfer_queue.backend"), job.settings.group_filter
    tasks = (group_filter.max_tasks if group_filter else None) or batch
    size = OmegaConf.select(backend, "SimpleStorage.total_storage_size")
    times, also = (1, "") if critic is None else (2, " x 2 with the critic's")
    if backend.storage_backend == "SimpleStorage" and size is not None and size < (rows := tasks * k * times):
        yield (
            f"transfer_queue.backend.SimpleStorage.total_storage_size={size}: a step makes at least {rows} rows, "
            f"{tasks} tasks x {k} candidates x decisions of an episode{also}: set it to a few times what all "
            "decisions make, or to null for no limit"
        )


def of_overlap(job: Job) -> Iterator[str]:
    """Validation tasks that are also training tasks, or near duplicates of them by their texts.

    Makes every task of the run; `contamination.overlaps` documents the cost.
    """
    if job.settings.allow_overlap:
        return
    with asking(job.name, "making its tasks"):
        overlap = next(contamination.overlaps(job.env, job.tasks, job.settings.split_size(job.env, "val")), None)
    if overlap is not None:
        accept = "set at_grpo.allow_overlap=true to accept it"
        yield f"at_grpo.environment: {overlap}; make the splits disjoint, or {accept}"


def of_bad_rows(job: Job) -> Iterator[str]:
    """Too many bad ones in a sample of rows of data, which is graded; logs what it shows."""
    settings = job.settings
    splits: tuple[Split, ...] = ("train", "val")
    sizes = {split: settings.split_size(job.env, split) for split in splits}
    for where, env, of_one in data_check.with_rows(job.env, sizes):
        for split, size in of_one.items():
            with asking(job.name, "grading its rows"):
                graded = data_check.check_rows(env, split, data_check.sample(env, split, size))
            level = logging.WARNING if graded.defects else logging.INFO
            logger.log(level, "at_grpo.environment: %s%s", where.replace(".", " "), graded)
            if graded.share > settings.max_bad_rows:
                yield (
                    f"at_grpo.environment.{where}{split}: {graded}, such as row {next(iter(graded.defects))}; see all "
                    "with verl-atgrpo data check, leave them out, or raise "
                    f"at_grpo.max_bad_rows={settings.max_bad_rows}"
                )
