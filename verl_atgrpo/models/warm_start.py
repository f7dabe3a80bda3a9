"""Teaching the tiny model the form of Plan-Path's answers, and not much of their substance.

It first sees right answers, then answers with random mistakes. What remains is a policy that knows the
format and has an idea of the way, but at temperature 1 mostly goes astray: what reinforcement learning
is meant to start from. No validation grid is ever shown.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from verl_atgrpo.environment import Message, stable_hash
from verl_atgrpo.environments.plan_path import MOVES, Cell, Draft, PlanPath, State, walk
from verl_atgrpo.models.local_policy import LocalPolicy, evaluate
from verl_atgrpo.models.tiny import build_model, build_tokenizer

logger = logging.getLogger(__name__)


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
    clean_steps: int = 1100
    """Optimizer steps on right answers."""
    noisy_steps: int = 100
    """Optimizer steps on answers with mistakes, after the clean ones."""
    noise: float = 0.7
    """Chance that a move of a noisy answer is replaced by a random one."""
    batch_size: int = 64
    learning_rate: float = 6e-3
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


def demonstration(env: PlanPath, rng: random.Random, noise: float) -> tuple[list[Message], str]:
    """Returns a prompt of either agent and an answer in which each move is wrong with chance `noise`."""
    task = env.task("train", rng.randrange(1 << 40))
    cells = [cell for cell in task.distance if cell != task.goal]
    # Ways around a wall are rare and what is hard: half of the time, start where there is one.
    detours = [cell for cell in cells if task.distance[cell] > _manhattan(cell, task.goal)]
    if detours and rng.random() < 0.5:
        position = rng.choice(detours)
    else:
        position = task.start if rng.random() < 0.7 else rng.choice(cells)
    state = State(task, position, task.distance[position])
    best = task.shortest(position, rng)[: env.max_moves]
    if rng.random() < 0.5:
        return env.grid_prompt(state, "draft"), spoil(best, noise, rng)
    # The planner meets good drafts as well as bad ones, so that it learns to look at where they lead.
    drafted = spoil(task.shortest(position, rng)[: env.max_moves], 0.3 if rng.random() < 0.5 else 0.0, rng)
    lead = walk(state, drafted)
    answer = drafted if lead.on_shortest_path else best
    return env.plan_prompt(state, Draft(drafted, drafted, lead)), spoil(answer, noise, rng)


def _manhattan(cell: Cell, goal: Cell) -> int:
    return abs(cell[0] - goal[0]) + abs(cell[1] - goal[1])


def spoil(moves: str, noise: float, rng: random.Random) -> str:
    """Replaces each move by a random one with chance `noise`."""
    return "".join(rng.choice("".join(MOVES)) if rng.random() < noise else move for move in moves)


def _batch(examples: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = max(len(prompt) + len(answer) for prompt, answer in examples)
    input_ids = torch.full((len(examples), width), pad)
    labels = torch.full((len(examples), width), -100)
    attention_mask = torch.zeros_like(input_ids)
    for row, (prompt, answer) in enumerate(examples):
        length = len(prompt) + len(answer)
        input_ids[row, :length] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : length] = torch.tensor(answer)
        attention_mask[row, :length] = 1
    return input_ids, labels, attention_mask


def _fit(
    settings: WarmStart,
    env: PlanPath,
    policy: LocalPolicy,
    rng: random.Random,
    steps: int,
    learning_rate: float,
    noise: float,
    progress: Callable[[int, float], None] | None,
) -> None:
    tokenizer, model = policy.tokenizer, policy.model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, weight_decay=settings.weight_decay, betas=(0.9, 0.95)
    )
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 30) * max(0.05, 1 - step / steps)
        examples = []
        for _ in range(settings.batch_size):
            messages, answer = demonstration(env, rng, noise)
            ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
            examples.append((policy.encode(messages), ids))
        input_ids, labels, attention_mask = _batch(examples, tokenizer.pad_token_id)
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if progress is not None:
            progress(step + 1, float(loss.detach()))


def train(settings: WarmStart, progress: Callable[[int, float], None] | None = None) -> tuple[Any, Any]:
    """Returns (model, tokenizer) after supervised training; the same settings give the same weights."""
    env, tokenizer = settings.environment(), build_tokenizer()
    model = build_model(tokenizer, settings.seed, settings.hidden, settings.layers, settings.tied)
    policy = LocalPolicy(model, tokenizer, settings.max_moves + 2)
    rng = random.Random(stable_hash("warm start", settings.seed))
    model.train()
    _fit(settings, env, policy, rng, settings.clean_steps, settings.learning_rate, 0.0, progress)
    _fit(settings, env, policy, rng, settings.noisy_steps, settings.noisy_learning_rate, settings.noise, progress)
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
