"""`verl-atgrpo eval` and `verl-atgrpo compare`, without argument parsing."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_atgrpo.files import FileError
from verl_atgrpo.lab.evaluation import figures
from verl_atgrpo.lab.evaluation.episodes import Lineup, check_tasks, pending, play_all, wanted
from verl_atgrpo.lab.evaluation.results import EpisodeKey, ResultFile, read
from verl_atgrpo.play.remote import RemoteModel, RemotePolicy
from verl_atgrpo.play.sampler import Sampler
from verl_atgrpo.train.config import check
from verl_atgrpo.train.config.chat_rules import of_chat
from verl_atgrpo.train.config.job import longest_row

if TYPE_CHECKING:
    from verl_atgrpo.lab.evaluation.engine import Engine
    from verl_atgrpo.lab.evaluation.plan import Options, Plan
    from verl_atgrpo.train.rollout.policy import ServedPolicy

logger = logging.getLogger(__name__)


def evaluate(options: Options, out: Path, *, ks: Sequence[int] | None = None, in_flight: int = 128) -> str:
    """Plays the episodes that are missing in `out` and returns the figures of all requested ones, as text.

    Args:
        options: what to play.
        out: the result file; an existing one is continued.
        ks: values of k for pass@k; None for the powers of two up to the episodes per task.
        in_flight: number of concurrent episodes.

    Raises ValueError if options, recipe and file are inconsistent, and RuntimeError if episodes could not be played,
    or all of them failed; `out` has those that ended.
    """
    from verl_atgrpo.lab.evaluation import plan as plans

    if in_flight < 1:
        raise ValueError(f"--in-flight {in_flight}: at least 1")
    plan = plans.make(options)
    keys = wanted(plan.tasks, plan.seeds, plan.episodes)
    per_task = len(plan.seeds) * plan.episodes
    for k in ks or ():
        figures.pass_at_k(per_task, 0, k)
    data_sets = plan.environment.data_sets("val")
    with ResultFile(out, plan.header, {"overrides": list(options.overrides), "data_sets": dict(data_sets)}) as results:
        todo = pending(keys, results.rows)
        try:
            check_tasks(plan.environment, [results.rows[key] for key in set(keys).difference(todo)])
        except ValueError as error:
            raise ValueError(f"{out}: {error}") from None
        logger.info("%s: %d episodes, %d of them done already", out, len(keys), len(keys) - len(todo))
        if todo:
            asyncio.run(_play(plan, todo, results, in_flight))
        rows = [results.rows[key] for key in keys]
        failed = [row.failed for row in rows if row.failed is not None]
        if len(failed) == len(rows):
            reasons = ", ".join(f"{reason} {n}" for reason, n in Counter(why.reason for why in failed).items())
            raise RuntimeError(
                f"{out}: all {len(rows)} episodes failed ({reasons}), so there are no figures; the same command "
                f"retries them. The last failure: {failed[-1].message}"
            )
        others = {*plan.versus.values()}
        of_team = [row.without(others) for row in rows] if others else rows
        table = figures.figures_table(figures.figures(of_team, ks, data_sets))
        return f"{table}\n{figures.games(rows, str(options.versus), others)}" if plan.versus else table


async def _play(plan: Plan, keys: Sequence[EpisodeKey], results: ResultFile, in_flight: int) -> None:
    async with AsyncExitStack() as stack:
        engines: dict[str, Engine] = {}
        models: dict[str, Any] = {}

        async def sampler(agent: str, name: str) -> Sampler:
            source = plan.players[name].source
            if not isinstance(source, RemoteModel):
                return await _served(plan, agent, name, engines, models, stack)
            remote = RemotePolicy(
                source,
                plan.agent_sampling[agent].model_dump(exclude_none=True),
                sampling=plan.sampling,
                max_response_length=plan.max_response_length,
                chat_template_kwargs=plan.chat_template_kwargs,
                request_timeout=plan.request_timeout,
            )
            return await stack.enter_async_context(remote)

        samplers = {agent: await sampler(agent, name) for agent, name in plan.agents.items()}
        versus = {agent: await sampler(agent, name) for agent, name in plan.versus.items()}
        lineup = Lineup(plan.agents, samplers, plan.versus, versus)
        await play_all(plan.environment, lineup, keys, results, in_flight=in_flight, max_failed=plan.max_failed)


async def _served(
    plan: Plan, agent: str, name: str, engines: dict[str, Engine], models: dict[str, Any], stack: AsyncExitStack
) -> ServedPolicy:
    """Returns an agent's sampler, whose engine `stack` closes.

    Args:
        name: the agent's player.
        engines: those that run, by their arguments; equal ones are one engine.
        models: verl's `model` sections that were loaded, with their tokenizers, by player.
    """
    from hydra.errors import InstantiationException
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.utils import get_max_position_embeddings

    from verl_atgrpo.lab.evaluation.engine import Engine
    from verl_atgrpo.train.chat import Chat
    from verl_atgrpo.train.rollout.policy import ServedPolicy
    from verl_atgrpo.train.serving.server import ADAPTER

    player = plan.players[name]
    if name not in models:
        try:
            models[name] = omega_conf_to_dataclass(player.model)
        except InstantiationException as error:
            cause = str(error.__cause__ or error).strip().partition("\n")[0]
            raise ValueError(
                f"{player.source}: this model cannot be loaded; it is no folder here, or not a whole one ({cause})"
            ) from error
    model = models[name]
    if not model.tokenizer.chat_template:
        raise ValueError(f"{player.source}: the tokenizer has no chat template; a team's prompts are chats")
    (row, needed), longest = longest_row(plan), get_max_position_embeddings(model.hf_config)
    if longest < row:
        raise ValueError(f"{player.source}: the model has {longest} positions; {needed}, shorten them")
    check(of_chat(plan.agent_sampling[agent], f"agent {agent!r}", str(player.source), model.tokenizer))
    assert player.engine is not None
    key = repr(player.engine)
    if key not in engines:  # one after the other: engines that start together misjudge the free memory
        engines[key] = await stack.enter_async_context(Engine(player.engine, model.tokenizer, model.processor))
    return ServedPolicy.of(
        plan.agent_sampling[agent],
        Chat(model.tokenizer, plan.chat_template_kwargs, player.tool_format),
        client=engines[key],
        # As in training, the text is decoded from all ids at once.
        sampling_params={**plan.sampling, "repetition_penalty": 1.0, "detokenize": False, ADAPTER: player.adapter},
        max_prompt_length=plan.max_prompt_length,
        max_response_length=plan.max_response_length,
        request_timeout=plan.request_timeout,
    )


def compare(first: Path, second: Path, *, common_only: bool = False) -> str:
    """Returns a comparison of the teams of two result files, `second` against `first`, as text.

    Raises FileError for what is no result file, or has no episodes, and as `figures.compare`.
    """
    results = [read(path) for path in (first, second)]
    rows = [list(one.rows.values()) for one in results]
    for path, mine in zip((first, second), rows, strict=True):
        if not mine:
            raise FileError(f"{path} has no episodes: name a file that verl-atgrpo eval has finished")
    try:
        comparison = figures.compare(rows[0], rows[1], results[0].data_sets, common_only=common_only)
    except ValueError as error:
        raise ValueError(f"{first}, {second}: {error}") from None
    return figures.comparison_table(comparison, str(first), str(second))
