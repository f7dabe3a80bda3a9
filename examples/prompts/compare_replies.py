"""Shows whether a model can tell right replies from wrong ones before any training: minutes instead of a failed run.

    python examples/prompts/compare_replies.py runs/models/smollm2 --environment walk_walls \\
        --replies navigator=up,down,left,right checker=free,wall

At every decision of an agent each of its replies is scored by the environment; the best one is committed. The log-prob
of a reply after the prompt, less the mean of all replies', is compared between decisions where it earns most and where
it does not. AUC is the probability that it is larger in the former: .5 is chance. Change the prompt until it is far
above (docs/small_models.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_atgrpo import Environment, EpisodeFailed, Message, Team, make, play
from verl_atgrpo.play.types import Decision, Generation, TeamOptions

logger = logging.getLogger("compare_replies")
LogProb = Callable[[list[int], str], float]
"""(prompt ids, reply) -> log-prob of the reply."""


@dataclass(frozen=True)
class Comparison:
    """How well an agent's replies are told apart."""

    agent: str
    decisions: int
    auc: float
    """Mean over replies that are right at some decisions and wrong at others; nan without one."""
    right: float
    """Mean share of the right replies in the probability of all replies."""
    mass: float
    """Mean probability of all replies together."""


class Replies:
    """A sampler that gives an agent's replies one after the other, whatever the prompt."""

    def __init__(self, encode: Callable[[Sequence[Message]], list[int]], replies: Sequence[str]) -> None:
        self.encode = encode
        self._replies = replies
        self._asked: Counter[str] = Counter()

    async def generate(self, decision_id: str, prompt_ids: list[int], seed: int | None) -> Generation:
        """Returns the next reply; begins again after the last."""
        number = self._asked[decision_id]
        self._asked[decision_id] += 1
        return Generation([0], [0.0], self._replies[number % len(self._replies)])


async def decided(environment: Environment, samplers: Mapping[str, Replies], most: int, tasks: int) -> list[Decision]:
    """Plays training tasks and returns their decisions, with all replies as candidates.

    Args:
        environment: plays the tasks.
        samplers: one for each agent.
        most: the largest number of replies of an agent.
        tasks: number of tasks; one in which a decision fails is left out.
    """
    made = []
    for index in range(tasks):
        team = Team(samplers, TeamOptions(candidates=most))
        try:
            made += (await play(environment, environment.task("train", index), team)).decisions
        except EpisodeFailed as failure:
            logger.warning("task %d: %s", index, failure)
    return made


def compare(agent: str, decisions: Sequence[Decision], log_prob: LogProb) -> Comparison:
    """Compares the log-probs of an agent's replies with their rewards.

    Decisions at which all replies earn the same are left out.
    """
    right: dict[str, list[float]] = defaultdict(list)
    wrong: dict[str, list[float]] = defaultdict(list)
    shares, masses = [], []
    for decision in decisions:
        earned = {candidate.generation.text: candidate.reward for candidate in decision.candidates}
        if decision.agent != agent or len(set(earned.values())) == 1:
            continue
        log_probs = {reply: log_prob(decision.prompt_ids, reply) for reply in earned}
        mean = math.fsum(log_probs.values()) / len(log_probs)
        mass = math.fsum(map(math.exp, log_probs.values()))
        best = max(earned.values())
        for reply, reward in earned.items():
            (right if reward == best else wrong)[reply].append(log_probs[reply] - mean)
        shares.append(math.fsum(math.exp(log_probs[reply]) for reply in earned if earned[reply] == best) / mass)
        masses.append(mass)
    areas = [area(right[reply], wrong[reply]) for reply in right if reply in wrong]
    return Comparison(agent, len(shares), _mean(areas), _mean(shares), _mean(masses))


def area(right: Sequence[float], wrong: Sequence[float]) -> float:
    """Returns the probability that a value of `right` is larger than one of `wrong`; ties count half."""
    return sum((x > y) + 0.5 * (x == y) for x in right for y in wrong) / (len(right) * len(wrong))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def main() -> None:
    """Prints one line for each agent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model with a chat template")
    parser.add_argument("--environment", required=True)
    parser.add_argument("--options", type=json.loads, default={}, help="the environment's options, as JSON")
    parser.add_argument("--replies", nargs="+", required=True, metavar="AGENT=REPLY,REPLY,...")
    parser.add_argument("--tasks", type=int, default=20)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()

    def encode(messages: Sequence[Message]) -> list[int]:
        chat: Any = [dict(message) for message in messages]
        ids: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return ids

    @torch.no_grad()
    def log_prob(prompt_ids: list[int], reply: str) -> float:
        ids = tokenizer.encode(reply, add_special_tokens=False)
        logits = model(torch.tensor([[*prompt_ids, *ids]])).logits[0, len(prompt_ids) - 1 : -1]
        return float(logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).sum())

    replies = {agent: words.split(",") for agent, _, words in (one.partition("=") for one in arguments.replies)}
    environment = make(arguments.environment, **arguments.options)
    if missing := set(environment.agents) ^ set(replies):
        parser.error(f"--replies: give those of {', '.join(environment.agents)}; differs in {', '.join(missing)}")
    samplers = {agent: Replies(encode, words) for agent, words in replies.items()}
    decisions = asyncio.run(decided(environment, samplers, max(map(len, replies.values())), arguments.tasks))
    for agent in environment.agents:
        found = compare(agent, decisions, log_prob)
        logger.info(
            "%-12s AUC %.2f  right %.2f  all replies %.3f  (%d decisions)",
            agent,
            found.auc,
            found.right,
            found.mass,
            found.decisions,
        )


if __name__ == "__main__":
    main()
