"""verl's agent-loop worker, playing whole episodes: one prompt of verl is one task of the environment."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import transfer_queue as tq
from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_atgrpo.config import AtGrpoConfig
from verl_atgrpo.policy_config import job_of
from verl_atgrpo.rollout.policy import ServedPolicy
from verl_atgrpo.rollout.rows import Row, failed_validation_row, training_rows, validation_rows
from verl_atgrpo.rollout.trace import Episode, TraceBudget, TracedTeam
from verl_atgrpo.team import EpisodeFailed, EpisodeRecord, episode_seed, play

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


@dataclass
class WorkerReport:
    """What a worker counted since it was last asked."""

    counts: Counter[str] = field(default_factory=Counter)
    error: str | None = None
    """A defect (not a failed candidate) in an environment or in the rollout; the run must stop."""


class TeamRolloutWorker(AgentLoopWorkerTQ.__ray_actor_class__):  # type: ignore[misc,name-defined]
    """Plays the episodes of the tasks it is given and writes their rows to TransferQueue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = AtGrpoConfig.from_config(self.config)
        self._environment = self._settings.make_environment()
        self._policy_of = self._settings.policies_of(self._environment)
        self._validation_policy_of = self._settings.validation_policies_of(self._environment)
        self._needs = self._settings.spec().needs
        self._tokenizers = {
            name: omega_conf_to_dataclass(job_of(self.config, name).actor_rollout_ref.model).tokenizer
            for name in self._settings.policy_settings()
        }
        # The text is decoded here, once and as a whole; vLLM need not do it token by token.
        self._engine_params = {"detokenize": False} if self.rollout_config.name == "vllm" else {}
        self._report = WorkerReport()
        tracing = self.rollout_config.trace
        self._traces = TraceBudget(tracing.max_samples_per_step_per_worker)
        if tracing.token2text:
            for name, client in self.llm_client.clients.items():
                client.tokenizer = self._tokenizers[name]

    def drain_report(self) -> WorkerReport:
        """Returns the counts since the last call and starts over."""
        report, self._report = self._report, WorkerReport(error=self._report.error)
        return report

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        """Plays the episodes of one task; a failed episode in training leaves no row and is replaced."""
        validate = bool(trajectory["validate"])
        uid, partition = prompt["uid"], "val" if validate else "train"
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": "running"})
        # verl's V1 loop always says no; its older one takes that many tasks of a step, with all their episodes.
        trace = self._traces.take(int(prompt["global_steps"]), validate)
        results = await asyncio.gather(
            *(
                self._play(prompt, session, validate, sampling_params, trace)
                for session in range(self._episodes(validate))
            ),
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
                self._report.error = f"task {prompt['index']} ({partition}): {type(result).__name__}: {result}"
                logger.error("task %s (%s): defect", prompt["index"], partition, exc_info=result)
                status = "failure"
        if status == "finished":
            for session, result in enumerate(results):
                await self._write(prompt, session, result, validate, partition)
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": status})

    def _episodes(self, validate: bool) -> int:
        if validate:
            return int(self.config.actor_rollout_ref.rollout.val_kwargs.n)
        return self._settings.candidates if self._settings.scheme == "parallel" else 1

    async def _play(
        self, prompt: dict[str, Any], session: int, validate: bool, sampling_params: dict[str, Any], trace: bool
    ) -> EpisodeRecord:
        split, index = prompt["split"], int(prompt["index"])
        policy_of = self._validation_policy_of if validate else self._policy_of
        policies = {
            name: ServedPolicy(
                client=self.llm_client.clients[name],
                tokenizer=self._tokenizers[name],
                chat_template_kwargs=dict(self.config.data.get("apply_chat_template_kwargs") or {}),
                sampling_params={**sampling_params, **self._engine_params},
                max_prompt_length=int(self.config.data.max_prompt_length),
                max_response_length=int(self.config.data.max_response_length),
                request_timeout=self._settings.request_timeout,
            )
            for name in set(policy_of.values())
        }
        team = TracedTeam(
            policy_of,
            policies,
            self._settings.team_options(),
            scheme="evaluate" if validate else "tree" if self._settings.scheme == "tree" else "parallel",
            episode_id=f"{prompt['uid']}.{session}",
            seed=episode_seed(
                self._settings.seed, split, "val" if validate else int(prompt["global_steps"]), index, session
            ),
            episode=Episode(int(prompt["global_steps"]), index, session, validate, trace),
        )
        try:
            return await play(self._environment, self._environment.task(split, index), team)
        finally:
            if not validate:
                self._report.counts["candidates"] += sum(policy.requests for policy in policies.values())
                self._report.counts["tokens"] += team.generated_tokens

    async def _write(
        self,
        prompt: dict[str, Any],
        session: int,
        result: EpisodeRecord | BaseException,
        validate: bool,
        partition: str,
    ) -> None:
        uid = prompt["uid"]
        info: dict[str, float] = {}
        rows: Iterable[Row]
        turns = 0
        if isinstance(result, EpisodeRecord):
            rows = (
                validation_rows(uid, session, result)
                if validate
                else training_rows(uid, session, result, self._settings.scheme, self._needs)
            )
            turns = len(result.decisions)
            # The same keys on every validation row, or TransferQueue drops the field.
            if validate:
                info = {"acc": float(result.outcome.success), "failed": 0.0, **result.outcome.metrics}
        else:
            policy, tokenizer = next(iter(self._tokenizers.items()))
            rows = [failed_validation_row(uid, session, policy, tokenizer.eos_token_id)]
            info = {"acc": 0.0, "failed": 1.0}
        keys, fields, tags = [], [], []
        for row in rows:
            keys.append(row.key)
            fields.append(self._fields(row, session, turns, info, prompt))
            prompt_length, response_length = len(row.prompt_ids), len(row.generation.token_ids)
            first, last = row.generation.weights_version
            tags.append(
                {
                    "status": "success",
                    "prompt_len": prompt_length,
                    "response_len": response_length,
                    "seq_len": prompt_length + response_length,
                    "task": int(prompt["index"]),
                    "global_steps": int(prompt["global_steps"]),
                    "min_global_steps": first,
                    "max_global_steps": last,
                    **row.tags,
                }
            )
        await tq.async_kv_batch_put(
            keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id=partition
        )

    def _fields(
        self, row: Row, session: int, turns: int, info: dict[str, float], prompt: dict[str, Any]
    ) -> dict[str, Any]:
        generation = row.generation
        first, last = generation.weights_version
        output = AgentLoopOutput(
            prompt_ids=row.prompt_ids,
            response_ids=generation.token_ids,
            response_mask=[1] * len(generation.token_ids),
            # Set explicitly on every row: verl drops fields that are unset, and a field that is missing
            # on one row is dropped from all.
            response_logprobs=generation.log_probs or None,
            reward_score=row.reward,
            num_turns=turns,
            metrics=AgentLoopMetrics(),
            extra_fields={"min_global_steps": first, "max_global_steps": last, "reward_extra_info": info},
        )
        fields: dict[str, Any] = output.as_dict()
        input_ids = torch.cat([fields["prompts"], fields["responses"]])
        attention_mask = torch.ones_like(input_ids)
        fields.update(
            input_ids=input_ids,
            position_ids=self._compute_position_ids(input_ids[None], attention_mask[None], {}).squeeze(0),
            multi_modal_inputs={},
            loss_mask=fields["response_mask"],
            uid=row.group,
            session_id=session,
            index=int(prompt["index"]),
            data_source=prompt["data_source"],
            global_steps=int(prompt["global_steps"]),
        )
        return fields
