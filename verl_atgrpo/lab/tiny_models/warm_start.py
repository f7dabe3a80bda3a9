"""Supervised fine-tuning of tiny models, the starting point of reinforcement learning on the CPU.

Training on correct answers is followed by training on answers with random mistakes, to leave room for RL: the policy
knows the format but at temperature 1 solves few tasks. Answers come from `demonstrations`, on training tasks only.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, TypeAdapter

from verl_atgrpo.files import FileError, Number, Whole, move_into, read_json, temporary_folder
from verl_atgrpo.lab.export import check_model, refuse_to_overwrite
from verl_atgrpo.lab.tiny_models.demonstrations import END, Demonstration, Demonstrator, demonstrator_of
from verl_atgrpo.lab.tiny_models.tiny import LocalPolicy, build_model, build_tokenizer, evaluate
from verl_atgrpo.play.environment import Environment
from verl_atgrpo.play.seeds import stable_hash

logger = logging.getLogger(__name__)

_FILE = "warm_start.json"


class _Known(BaseModel):
    """Content of `warm_start.json`."""

    settings: dict[str, Any]
    parameters: Whole
    seconds: Number
    tasks: Whole
    success: Number


_KNOWN = TypeAdapter(_Known)


@dataclass(frozen=True)
class WarmStart:
    """Settings of the fine-tuning; with the same demonstrations, equal settings give equal weights."""

    environment: str = "plan_path"
    """Names the demonstrator, as in `demonstrator_of`."""
    seed: int = 0
    hidden: int = 64
    layers: int = 3
    tied: bool = True
    clean_steps: int = 900
    """Optimizer steps on correct answers."""
    noisy_steps: int = 150
    """Optimizer steps on answers with random mistakes, after the clean ones."""
    noise: float = 0.9
    """Probability that a relevant token of a noisy answer (a move, a digit) is random."""
    batch_size: int = 64
    matrix_learning_rate: float = 0.02
    """Learning rate of the layers' matrices (Muon)."""
    learning_rate: float = 6e-3
    """Learning rate of embedding, norms and head (AdamW)."""
    noisy_learning_rate: float = 3e-4
    """Learning rate of the noisy steps; small, to raise the entropy without losing what was learned."""
    weight_decay: float = 0.02
    """Keeps weights small, and so the rounding differences between server and actor."""

    @classmethod
    def of(cls, environment: str, **changes: Any) -> WarmStart:
        """Returns the settings for an environment, with `changes`; raises ValueError for one that there is not."""
        settings = {**demonstrator_of(environment).training, **changes}
        known = [one.name for one in fields(cls)][1:]
        if unknown := [name for name in settings if name not in known]:
            raise ValueError(f"{environment}: training has {', '.join(unknown)}; the settings are {', '.join(known)}")
        return cls(environment, **settings)

    @property
    def demonstrator(self) -> Demonstrator:
        """The environment's demonstrator."""
        return demonstrator_of(self.environment)


def _loss(policy: LocalPolicy, demonstrations: Sequence[Demonstration]) -> torch.Tensor:
    """Returns the mean cross-entropy with the demonstrators' distributions, over all tokens of their answers."""
    tokenizer = policy.tokenizer

    def token(name: str) -> int:
        identifier: int = tokenizer.eos_token_id if name == END else tokenizer.convert_tokens_to_ids(name)
        if identifier == tokenizer.unk_token_id:
            raise ValueError(
                f"a demonstration's token {name!r} is not in the tokenizer: name it in Demonstrator.words"
            )
        return identifier

    texts, rows, columns, targets = [], [], [], []
    for row, shown in enumerate(demonstrations):
        prompt = policy.encode(shown.prompt, shown.tools)
        texts.append([*prompt, *map(token, shown.answer)])
        for place, choice in enumerate(shown.choices):
            rows.append(row)
            columns.append(len(prompt) - 1 + place)
            target = torch.zeros(len(tokenizer))
            for name, chance in choice.items():
                target[token(name)] = chance
            targets.append(target)
    padded = tokenizer.pad({"input_ids": texts}, padding_side="right", return_tensors="pt")
    logits = policy.model(**padded).logits
    return torch.nn.functional.cross_entropy(logits[rows, columns], torch.stack(targets))


def _optimizers(settings: WarmStart, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [weights for name, weights in model.named_parameters() if weights.ndim == 2 and ".layers." in name]
    others = [weights for name, weights in model.named_parameters() if weights.ndim != 2 or ".layers." not in name]
    decay = settings.weight_decay
    # Muon learns grids in half of AdamW's steps.
    return [
        torch.optim.Muon(matrices, lr=settings.matrix_learning_rate, weight_decay=decay),
        torch.optim.AdamW(others, lr=settings.learning_rate, weight_decay=decay, betas=(0.9, 0.95)),
    ]


def _fit(
    settings: WarmStart,
    env: Environment,
    policy: LocalPolicy,
    optimizers: Sequence[torch.optim.Optimizer],
    steps: int,
    noise: float,
) -> None:
    if steps == 0:
        return
    rng = random.Random(stable_hash("warm start", settings.seed, noise))

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / 30) * max(0.05, 1 - step / steps)

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    for step in range(steps):
        loss = _loss(policy, [settings.demonstrator.demonstrate(env, rng, noise) for _ in range(settings.batch_size)])
        policy.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if (step + 1) % 100 == 0:
            logger.info("warm start: step %d, loss %.3f", step + 1, loss.item())


def train(settings: WarmStart, env: Environment) -> tuple[Any, Any]:
    """Returns (model, tokenizer) after supervised training; equal settings give equal weights."""
    tokenizer = build_tokenizer(settings.demonstrator.words)
    model = build_model(tokenizer, settings.seed, settings.hidden, settings.layers, settings.tied)
    policy = LocalPolicy(model, tokenizer, settings.demonstrator.response_length)
    model.train()
    _fit(settings, env, policy, _optimizers(settings, model), settings.clean_steps, 0.0)
    unsure = torch.optim.AdamW(model.parameters(), lr=settings.noisy_learning_rate, weight_decay=settings.weight_decay)
    _fit(settings, env, policy, [unsure], settings.noisy_steps, settings.noise)
    model.eval()
    return model, tokenizer


def make(directory: Path, settings: WarmStart, force: bool = False) -> dict[str, Any]:
    """Trains the starting model into `directory` unless it exists; returns the content of its `warm_start.json`.

    The file has the settings, the number of parameters, the training time, and the team's success at temperature 1 on
    validation tasks. It is written last: if it has equal settings, the model is complete and is kept.

    Raises FileError if `directory` is a file, or without `force` has another model or a damaged one; OSError, before
    the training, if the folder cannot be written.
    """
    file = directory / _FILE
    shown = settings.demonstrator
    follows_from = {**asdict(settings), "options": dict(shown.options), "words": [*shown.words]}
    follows_from |= {"response_length": shown.response_length, "demonstrations": _digest(shown)}
    if not force:
        if file.exists():
            return _kept(file, follows_from)
        refuse_to_overwrite(directory, "name another folder, or overwrite it with --force")
    with temporary_folder(directory) as partial:
        known = _train_into(partial, settings, follows_from)
        file.unlink(missing_ok=True)
        move_into(partial, directory, last=_FILE)
    return known


def _digest(demonstrator: Demonstrator) -> int:
    """Returns a number that another way to demonstrate changes."""
    env, rng = demonstrator.make_environment(), random.Random(0)
    shown = [demonstrator.demonstrate(env, rng, 0.5) for _ in range(8)]
    return stable_hash("demonstrations", [(one.prompt, one.answer, one.choices) for one in shown])


def _kept(file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of an existing `warm_start.json`; raises FileError if it was made with other settings."""
    try:
        known = read_json(file, _KNOWN, "the settings of a starting model")
        check_model(file.parent)
    except (FileError, FileNotFoundError) as error:
        raise FileError(f"{error}; make it again with --force") from error
    for name in known.settings:  # older versions kept fewer
        if known.settings.get(name) != settings.get(name):
            raise FileError(
                f"{file}: the model was made with {name}={known.settings.get(name)!r}, not {settings.get(name)!r}; "
                "name another folder, or make it again with --force"
            )
    return known.model_dump()


def _train_into(directory: Path, settings: WarmStart, follows_from: dict[str, Any]) -> dict[str, Any]:
    demonstrator = settings.demonstrator
    # Two threads are a third faster on idle cores but ten times slower on busy ones, because they spin.
    torch.set_num_threads(1)
    env = demonstrator.make_environment()
    started = time.perf_counter()
    model, tokenizer = train(settings, env)
    seconds = time.perf_counter() - started
    tasks = min(200, env.num_tasks("val") or 200)
    episodes = evaluate(env, LocalPolicy(model, tokenizer, demonstrator.response_length), tasks)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    known: dict[str, Any] = {
        "settings": follows_from,
        "parameters": sum(weights.numel() for weights in model.parameters()),
        "seconds": round(seconds, 1),
        "tasks": tasks,
        "success": sum(record.outcome.success for record in episodes) / tasks,
    }
    (directory / _FILE).write_text(json.dumps(known, indent=2))
    return known
