"""Teaching the tiny model the form of Plan-Path's answers, and not much of their substance.

It first learns from right answers, then from answers with random mistakes. What remains is a policy that
knows the format and has an idea of the way, but at temperature 1 mostly goes astray: what reinforcement
learning is meant to start from. No validation grid is ever shown.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from verl_atgrpo.environment import Message, stable_hash
from verl_atgrpo.environments.drafting import Draft
from verl_atgrpo.environments.grid import MOVES, Cell, PlanPathTask, State, walk
from verl_atgrpo.environments.plan_path import PlanPath
from verl_atgrpo.models.local_policy import LocalPolicy, evaluate
from verl_atgrpo.models.tiny import build_model, build_tokenizer

logger = logging.getLogger(__name__)

END = ""
"""Stands for the end of an answer among a demonstrator's choices."""


@dataclass(frozen=True)
class WarmStart:
    """Everything the starting model follows from; two equal ones give the same weights."""

    size: int = 4
    wall_density: float = 0.2
    max_turns: int = 4
    max_moves: int = 8
    seed: int = 0
    hidden: int = 64
    layers: int = 3
    tied: bool = True
    clean_steps: int = 900
    """Optimizer steps on right answers."""
    noisy_steps: int = 150
    """Optimizer steps on answers with mistakes, after the clean ones."""
    noise: float = 0.9
    """Chance that a move of a noisy answer is a random one."""
    batch_size: int = 64
    matrix_learning_rate: float = 0.02
    """Of the layers' matrices (Muon)."""
    learning_rate: float = 6e-3
    """Of the embedding, the norms and the head (AdamW)."""
    noisy_learning_rate: float = 3e-4
    """Small: the mistakes shall make the policy unsure, not take away what it understood of grids."""
    weight_decay: float = 0.02
    """Keeps the weights small, and with them the rounding differences between server and actor."""

    def environment(self) -> PlanPath:
        """Returns the environment whose answers are taught."""
        return PlanPath(
            size=self.size,
            wall_density=self.wall_density,
            max_turns=self.max_turns,
            max_moves=self.max_moves,
            tool="moves",
            style="compact",
        )


@dataclass(frozen=True)
class Demonstration:
    """A prompt, an answer to it, and how likely the demonstrator was to go on otherwise."""

    prompt: list[Message]
    moves: str
    choices: list[dict[str, float]]
    """The demonstrator's distribution over moves and END at every place of the answer: len(moves) + 1 of
    them. Learning from these instead of from the one move drawn takes several times fewer examples."""


def demonstrate(
    task: PlanPathTask, position: Cell, noise: float, limit: int, rng: random.Random, draft: str = ""
) -> tuple[str, list[dict[str, float]]]:
    """Returns an answer from `position` and the choices it was drawn from.

    The demonstrator takes any step that comes closer to the goal, or follows `draft` for as long as it
    has done so; each move is a random one with chance `noise`, after which it goes on from where that led.
    """
    moves, choices = "", []
    while position != task.goal and len(moves) < limit:
        if draft.startswith(moves) and len(draft) > len(moves):
            good = [draft[len(moves)]]
        else:
            good = [
                name for name in MOVES if task.distance.get(_step(position, name), -1) == task.distance[position] - 1
            ]
        choices.append({name: noise / len(MOVES) + (name in good) * (1 - noise) / len(good) for name in MOVES})
        names, chances = zip(*choices[-1].items(), strict=True)
        move = rng.choices(names, chances)[0]
        moves += move
        if task.free(_step(position, move)):
            position = _step(position, move)
    return moves, [*choices, {END: 1.0}]


def demonstration(env: PlanPath, rng: random.Random, noise: float) -> Demonstration:
    """Returns a demonstration for either agent on a training task drawn with `rng`."""
    task = env.task("train", rng.randrange(1 << 40))
    cells = [cell for cell in task.distance if cell != task.goal]
    # Ways around a wall are rare and what is hard: half of the time, start where there is one.
    detours = [cell for cell in cells if task.distance[cell] > _manhattan(cell, task.goal)]
    if detours and rng.random() < 0.5:
        position = rng.choice(detours)
    else:
        position = task.start if rng.random() < 0.7 else rng.choice(cells)
    state = State(task, position, task.distance[position])
    if rng.random() < 0.5:
        answer = demonstrate(task, position, noise, env.max_moves, rng)
        return Demonstration(env.draft_prompt(state), *answer)
    # The planner meets good drafts as well as bad ones, so that it learns to look at where they lead.
    drafted, _ = demonstrate(task, position, 0.3 if rng.random() < 0.5 else 0.0, env.max_moves, rng)
    lead = walk(state, drafted)
    answer = demonstrate(task, position, noise, env.max_moves, rng, drafted if lead.on_shortest_path else "")
    return Demonstration(env.plan_prompt(state, Draft(drafted, drafted)), *answer)


def _step(position: Cell, move: str) -> Cell:
    return position[0] + MOVES[move][0], position[1] + MOVES[move][1]


def _manhattan(cell: Cell, goal: Cell) -> int:
    return abs(cell[0] - goal[0]) + abs(cell[1] - goal[1])


def _loss(policy: LocalPolicy, demonstrations: Sequence[Demonstration]) -> torch.Tensor:
    """Returns the mean cross-entropy of the demonstrators' choices, over every token of their answers."""
    tokenizer = policy.tokenizer
    token_of = {name: tokenizer.convert_tokens_to_ids(name) for name in MOVES} | {END: tokenizer.eos_token_id}
    prompts = [policy.encode(shown.prompt) for shown in demonstrations]
    width = max(len(prompt) + len(shown.moves) for prompt, shown in zip(prompts, demonstrations, strict=True))
    input_ids = torch.full((len(prompts), width), tokenizer.pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    rows, columns, targets = [], [], []
    for row, (prompt, shown) in enumerate(zip(prompts, demonstrations, strict=True)):
        tokens = [*prompt, *(token_of[move] for move in shown.moves)]
        input_ids[row, : len(tokens)] = torch.tensor(tokens)
        attention_mask[row, : len(tokens)] = 1
        for place, choice in enumerate(shown.choices):
            rows.append(row)
            columns.append(len(prompt) - 1 + place)
            target = torch.zeros(len(tokenizer))
            for name, chance in choice.items():
                target[token_of[name]] = chance
            targets.append(target)
    logits = policy.model(input_ids=input_ids, attention_mask=attention_mask).logits
    return torch.nn.functional.cross_entropy(logits[rows, columns], torch.stack(targets))


def _optimizers(settings: WarmStart, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [weights for name, weights in model.named_parameters() if weights.ndim == 2 and ".layers." in name]
    others = [weights for name, weights in model.named_parameters() if weights.ndim != 2 or ".layers." not in name]
    decay = settings.weight_decay
    # Muon understands the grids in half of AdamW's steps.
    return [
        torch.optim.Muon(matrices, lr=settings.matrix_learning_rate, weight_decay=decay),
        torch.optim.AdamW(others, lr=settings.learning_rate, weight_decay=decay, betas=(0.9, 0.95)),
    ]


def _fit(
    settings: WarmStart,
    env: PlanPath,
    policy: LocalPolicy,
    optimizers: Sequence[torch.optim.Optimizer],
    steps: int,
    noise: float,
    progress: Callable[[int, float], None] | None,
) -> None:
    if steps == 0:
        return
    rng = random.Random(stable_hash("warm start", settings.seed, noise))
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 30) * max(0.05, 1 - step / steps)
        )
        for optimizer in optimizers
    ]
    for step in range(steps):
        loss = _loss(policy, [demonstration(env, rng, noise) for _ in range(settings.batch_size)])
        policy.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if progress is not None:
            progress(step + 1, float(loss.detach()))


def train(settings: WarmStart, progress: Callable[[int, float], None] | None = None) -> tuple[Any, Any]:
    """Returns (model, tokenizer) after supervised training; the same settings give the same weights."""
    env, tokenizer = settings.environment(), build_tokenizer()
    model = build_model(tokenizer, settings.seed, settings.hidden, settings.layers, settings.tied)
    policy = LocalPolicy(model, tokenizer, settings.max_moves + 2)
    model.train()
    _fit(settings, env, policy, _optimizers(settings, model), settings.clean_steps, 0.0, progress)
    unsure = torch.optim.AdamW(model.parameters(), lr=settings.noisy_learning_rate, weight_decay=settings.weight_decay)
    _fit(settings, env, policy, [unsure], settings.noisy_steps, settings.noise, progress)
    model.eval()
    return model, tokenizer


def success_rate(model: Any, tokenizer: Any, env: PlanPath, tasks: int = 200) -> float:
    """Returns the team's success at temperature 1 on the first validation tasks."""
    policy = LocalPolicy(model, tokenizer, env.max_moves + 2)
    return sum(record.outcome.success for record in evaluate(env, policy, tasks)) / tasks


def make(directory: Path, settings: WarmStart, force: bool = False) -> dict[str, Any]:
    """Makes the starting model in `directory` unless it is there already; returns what is known of it.

    The note `warm_start.json` beside the weights is written last: with the same settings in it, the
    model is complete and is kept.
    """
    note = directory / "warm_start.json"
    if note.exists() and not force:
        known: dict[str, Any] = json.loads(note.read_text())
        if known["settings"] == asdict(settings):
            return known
    torch.set_num_threads(2)
    started = time.perf_counter()
    model, tokenizer = train(settings, _log_progress)
    seconds = time.perf_counter() - started
    directory.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    known = {
        "settings": asdict(settings),
        "parameters": sum(weights.numel() for weights in model.parameters()),
        "seconds": round(seconds, 1),
        "success": success_rate(model, tokenizer, settings.environment()),
    }
    note.write_text(json.dumps(known, indent=2))
    return known


def _log_progress(step: int, loss: float) -> None:
    if step % 100 == 0:
        logger.info("warm start: step %d, loss %.3f", step, loss)
