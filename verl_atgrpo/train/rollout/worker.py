"""verl's agent-loop worker that plays whole episodes: a prompt of verl is a task of the environment."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils.config import omega_conf_to_dataclass

from verl_atgrpo.compat import freeze_startup_objects
from verl_atgrpo.play.branching import play_branched
from verl_atgrpo.play.endpoints import drain_refused
from verl_atgrpo.play.environment import play
from verl_atgrpo.play.mixture import Mixture
from verl_atgrpo.play.opponents import Opponent
from verl_atgrpo.play.seeds import episode_seed
from verl_atgrpo.play.team import Team
from verl_atgrpo.play.types import EVALUATE, TREE, EpisodeFailed, EpisodeRecord, PlayMode
from verl_atgrpo.play.user_code import contained
from verl_atgrpo.sandbox.pool import POOL
from verl_atgrpo.train.chat import Chat
from verl_atgrpo.train.config.job import longest_row
from verl_atgrpo.train.config.policies import config_of_policy
from verl_atgrpo.train.config.schema import AtGrpoConfig, CriticSettings
from verl_atgrpo.train.config.section import read_section
from verl_atgrpo.train.rollout import episode_rows
from verl_atgrpo.train.rollout.episode_rows import OPPONENT, RECORDED, SUBMISSION, WHOLE, Row
from verl_atgrpo.train.rollout.policy import ServedPolicy
from verl_atgrpo.train.rollout.trace import TraceBudget, TracedTeam
from verl_atgrpo.train.rows import queue
from verl_atgrpo.train.serving.requests import Gate, PatientClient, engine_params
from verl_atgrpo.train.serving.server import ADAPTER

logger = logging.getLogger(__name__)


MOST_SCORE_ERRORS = 20
"""Replies of a run whose scores may raise an error in one rollout worker; one more ends the run."""


@dataclass
class WorkerReport:
    """A worker's counts since its last report."""

    counts: Counter[str] = field(default_factory=Counter)
    error: str | None = None
    """An exception of an environment or of the rollout other than EpisodeFailed; the run must stop."""


class TeamRolloutWorker(AgentLoopWorkerTQ.__ray_actor_class__):  # type: ignore[misc,name-defined]
    """Plays the episodes of its tasks and writes their rows to the queue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = read_section(self.config)
        self._environment = self._settings.make_environment()
        self._policy_of = self._settings.policies_of(self._environment)
        self._validation_policy_of = self._settings.validation_policies_of(self._environment)
        self._needs = self._settings.spec.needs
        jobs = {
            name: config_of_policy(self.config, name).actor_rollout_ref for name in self._settings.policy_settings()
        }
        template_kwargs = dict(self.config.data.get("apply_chat_template_kwargs") or {})
        self._chats = {
            name: Chat(omega_conf_to_dataclass(job.model).tokenizer, template_kwargs, job.rollout.multi_turn.format)
            for name, job in jobs.items()
        }
        self._engine_params = engine_params(self._settings.mode)
        self._report = WorkerReport()
        self._score_errors: set[tuple[str, str, int, str]] = set()
        """Episode, agent, turn and reply of each score that raised."""
        trace = self.rollout_config.trace
        self._traces = None if trace.backend is None else TraceBudget(trace.max_samples_per_step_per_worker)
        self._gate = Gate()
        self._training_clients = self._patient(self._gate)
        self._validation_clients = self._patient(Gate())
        freeze_startup_objects()

    def _patient(self, gate: Gate) -> dict[str, PatientClient]:
        return {
            name: PatientClient(
                client,
                gate,
                timeout=self._settings.request_timeout,
                retries=self._settings.request_retries,
                count=lambda what: self._report.counts.update((what,)),
                tokenizer=self._chats[name].tokenizer,
            )
            for name, client in self.llm_client.clients.items()
        }

    def pause(self) -> None:
        """Pauses new requests of training episodes; validation continues."""
        self._gate.pause()

    def resume(self) -> None:
        """Resumes requests."""
        self._gate.resume()

    def drain_report(self) -> WorkerReport:
        """Returns and resets the counts."""
        report, self._report = self._report, WorkerReport(error=self._report.error)
        report.counts.update(POOL.drain_counts())
        if refused := drain_refused():
            report.counts["endpoint_requests_refused"] += refused
        return report

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        """Plays the episodes of one task; a failed training episode has no rows and its task is replaced."""
        validate = bool(trajectory["validate"])
        uid, partition = prompt["uid"], "val" if validate else "train"
        await queue.set_status(uid, partition, "running")
        # Not `trace`, which is always False in verl's V1 loop. Its older loop limits tasks, with all their episodes.
        traced = None if self._traces is None else self._traces.take(int(prompt["global_steps"]), validate)
        n = self.config.actor_rollout_ref.rollout.val_kwargs.n
        episodes = int(n) if validate else self._settings_of(prompt).training_episodes
        results = await asyncio.gather(
            *(self._play(prompt, session, validate, sampling_params, traced) for session in range(episodes)),
            return_exceptions=True,
        )
        status = "finished"
        for result in results:
            if isinstance(result, EpisodeFailed):
                if not validate:
                    self._report.counts["episodes_failed"] += 1
                    self._report.counts[f"failed/{result.reason}"] += 1
                logger.warning("task %s (%s): the episode failed: %s", prompt["index"], partition, result)
                status = status if validate else "failure"
            elif isinstance(result, BaseException):
                self._report_defect(prompt, partition, result)
                status = "failure"
        if status == "finished":
            written = await asyncio.gather(
                *(self._write(prompt, session, result, validate) for session, result in enumerate(results)),
                return_exceptions=True,
            )
            # The final status must be set even if the queue refuses a put, or the trainer would wait for ever.
            for error in (result for result in written if result is not None):
                self._report_defect(prompt, partition, error)
                status = "failure"
        await queue.set_status(uid, partition, status)

    def _report_defect(self, prompt: dict[str, Any], partition: str, error: BaseException) -> None:
        self._report.error = f"task {prompt['index']} ({partition}): {type(error).__name__}: {error}"
        logger.error("task %s (%s): defect", prompt["index"], partition, exc_info=error)

    def _count_score_error(self, where: str, agent: str, turn: int, reply: str, error: Exception) -> None:
        """Counts and logs a reply whose score raises; raises the error if there were too many of them.

        The same reply of a decision counts once: every continuation of a branch scores it again.
        """
        if (seen := (where, agent, turn, reply)) in self._score_errors:
            return
        self._score_errors.add(seen)
        self._report.counts["score_errors"] += 1
        logger.warning("%s, agent %r, turn %d: scoring %r raises", where, agent, turn, reply[:500], exc_info=error)
        if len(self._score_errors) > MOST_SCORE_ERRORS:
            raise RuntimeError(
                f"agent {agent!r}, turn {turn}: the scores of {len(self._score_errors)} replies raised an error in "
                f"this rollout worker, the last one for {reply[:500]!r}"
            ) from error

    async def _play(
        self,
        prompt: dict[str, Any],
        session: int,
        validate: bool,
        sampling_params: dict[str, Any],
        traced: bool | None,
    ) -> EpisodeRecord:
        split, index, step = prompt["split"], int(prompt["index"]), int(prompt["global_steps"])
        environment, policy_of = self._environment, self._validation_policy_of if validate else self._policy_of
        with contained(f"{type(environment).__name__}.task"):
            task = environment.task(split, index)
            opponents = environment.opponents(task)
        other = Opponent.parse(prompt[OPPONENT]) if opponents and OPPONENT in prompt else Opponent()
        if other.policy:
            policy_of = {**policy_of, **dict.fromkeys(opponents, other.policy)}
        clients = self._validation_clients if validate else self._training_clients

        def served(agent: str, policy: str) -> ServedPolicy:
            past = other.slot if agent in opponents else 0
            adapter = self._settings.past_number(past) if past else self._settings.adapter_number(policy)
            named = {} if adapter is None else {ADAPTER: adapter}
            return ServedPolicy.of(
                self._settings.sampling_of(agent, validate),
                self._chats[policy],
                sampling_params={**sampling_params, **self._engine_params, **named},
                client=clients[policy],
                max_prompt_length=int(self.config.data.max_prompt_length),
                max_response_length=int(self.config.data.max_response_length),
                request_timeout=None,
            )

        samplers = {agent: served(agent, policy) for agent, policy in policy_of.items()}
        # No wrapper without a trace backend.
        make: Callable[..., Team] = Team
        if traced is not None:
            of_trace = {"sample_index": index, "step": step, "rollout_n": session, "validate": validate}
            make = functools.partial(TracedTeam, attributes={**of_trace, "trace": traced})
        settings, teams, episode = self._settings_of(prompt), [], f"{prompt['uid']}.{session}"
        earlier = 0 if validate else int(prompt[SUBMISSION])
        seed = episode_seed(settings.seed, split, "val" if validate else step, index, session, earlier)

        def make_team(mode: PlayMode) -> Team:
            team = make(
                samplers,
                settings.team_options(),
                mode,
                policies=policy_of,
                opponents=opponents,
                episode_id=episode,
                seed=seed,
                on_score_error=functools.partial(self._count_score_error, f"task {index} ({split}), {episode}"),
            )
            teams.append(team)
            return team

        try:
            if settings.branch is not None and not validate:
                frozen = {name for name, one in settings.policy_settings().items() if not one.trainable}
                record = await play_branched(environment, task, make_team, settings.branch, seed, frozen)
            else:
                mode = EVALUATE if validate else TREE if settings.scheme == "tree" else PlayMode("parallel")
                record = await play(environment, task, make_team(mode))
            if not validate and record.decisions and not any(one.trained for one in record.decisions):
                raise EpisodeFailed("nothing_to_train", "no decision of the episode is trained (train=False)")
            return replace(record, opponents=opponents)
        finally:
            if not validate:
                for sampler in samplers.values():
                    self._report.counts.update(sampler.counts)
                for team in teams:
                    self._report.counts["tokens"] += team.generated_tokens
                    self._report.counts.update(team.counts)

    def _settings_of(self, prompt: dict[str, Any]) -> AtGrpoConfig:
        """Returns the settings of a task, in a mixture those of its part."""
        if not self._settings.parts or not isinstance(self._environment, Mixture):
            return self._settings
        return self._settings.of_part(self._environment.part_of(prompt["split"], int(prompt["index"])))

    async def _write(
        self, prompt: dict[str, Any], session: int, result: EpisodeRecord | BaseException, validate: bool
    ) -> None:
        uid, settings = prompt["uid"], self._settings_of(prompt)
        played = result.decisions if isinstance(result, EpisodeRecord) else []
        turns = len({one.name for one in played if not one.scope})
        info: dict[str, float] = {}
        if not isinstance(result, EpisodeRecord):
            policy, chat = next(iter(self._chats.items()))
            rows = [episode_rows.failed_validation_row(uid, session, policy, chat.tokenizer.eos_token_id)]
            info = {"acc": 0.0, "failed": 1.0}
        elif validate:
            rows = list(episode_rows.validation_rows(uid, session, result))
            info = {"acc": float(result.outcome.success), "failed": 0.0, **result.outcome.metrics}
        else:
            scheme, reward, number = settings.scheme, settings.episode_reward, settings.training_episodes
            rows = list(episode_rows.training_rows(uid, session, result, scheme, self._needs, reward, number))
            if rows and prompt[RECORDED]:
                rows += episode_rows.untrained_rows(uid, session, result, scheme)
        of_all = {WHOLE: validate or bool(prompt[RECORDED]) or all(one.trained for one in played)}
        if OPPONENT in prompt and isinstance(result, EpisodeRecord) and result.opponents:
            of_all[OPPONENT] = prompt[OPPONENT]
        tags = [{**self._tags(row, turns, prompt), **of_all} for row in rows]
        fields = self._fields(rows, turns, info, prompt)
        await queue.write([row.key for row in rows], fields, tags, "val" if validate else "train")
        if settings.critic is not None and isinstance(result, EpisodeRecord) and not validate:
            await self._write_for_critic(settings.critic, prompt, session, result)

    async def _write_for_critic(
        self, critic: CriticSettings, prompt: dict[str, Any], session: int, record: EpisodeRecord
    ) -> None:
        """Writes the critic's rows by themselves, as they have no log-probs of servers."""
        environment, policies = self._environment, self._settings.policy_settings()
        longest, _ = longest_row(self.config.data)
        hindsight = ""
        if critic.hindsight:
            with contained(f"{type(environment).__name__}.hindsight"):
                hindsight = environment.hindsight(environment.task(prompt["split"], int(prompt["index"])))
        trained = [agent for agent, policy in self._policy_of.items() if policies[policy].trainable]
        agents = trained if critic.agents is None else critic.agents
        tokenizers = {name: chat.tokenizer for name, chat in self._chats.items()}
        of_episode = (prompt["uid"], session, record)
        rows = list(episode_rows.critic_rows(*of_episode, critic.policy, tokenizers, hindsight, agents, longest))
        if rows:
            fields, tags = self._fields(rows, 0, {}, prompt), [self._tags(row, 0, prompt) for row in rows]
            await queue.write([row.key for row in rows], fields, tags, "train")

    def _tags(self, row: Row, turns: int, prompt: dict[str, Any]) -> dict[str, Any]:
        prompt_length, response_length = len(row.prompt_ids), len(row.generation.token_ids)
        first, last = row.generation.weights_version
        return {
            "status": "success",
            "prompt_len": prompt_length,
            "response_len": response_length,
            "seq_len": prompt_length + response_length,
            "num_turns": turns,
            "task": int(prompt["index"]),
            "global_steps": int(prompt["global_steps"]),
            SUBMISSION: int(prompt.get(SUBMISSION, 0)),  # validation submits each task once
            "min_global_steps": first,
            "max_global_steps": last,
            **row.tags,
        }

    def _fields(self, rows: Sequence[Row], turns: int, info: dict[str, float], prompt: dict[str, Any]) -> TensorDict:
        # Only processors with `get_rope_index` have positions other than 0, 1, 2, ...
        own = self._own_position_ids if hasattr(self.processor, "get_rope_index") else None
        return episode_rows.episode_fields(rows, turns, info, prompt["data_source"], own)

    def _own_position_ids(self, input_ids: Tensor) -> Tensor:
        ids = input_ids[None]
        positions: Tensor = self._compute_position_ids(ids, torch.ones_like(ids), {}).squeeze(0)
        return positions
