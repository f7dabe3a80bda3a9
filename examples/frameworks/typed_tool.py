"""A worker of Pydantic AI that looks a price up by a tool, and a teller that adds the delivery.

    export PYTHONPATH=examples/frameworks
    verl-atgrpo make-model runs/models/prices_tiny --environment typed_tool:SHOWN
    python -m verl.trainer.main_ppo --config-dir=examples/frameworks --config-name=typed_tool_cpu

The framework runs the tool and asks again. Scores follow from the state and the reply.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from openai import AsyncOpenAI
from pydantic_ai import Agent, ModelRetry
from pydantic_ai.exceptions import ModelAPIError, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from verl_atgrpo import Environment, Message, Outcome, Score, Split, Team, stable_hash
from verl_atgrpo.environments.common.splits import part_of
from verl_atgrpo.environments.common.words import read_number
from verl_atgrpo.lab.tiny_models.demonstrations import DIGITS, Demonstration, Demonstrator, unsure, write
from verl_atgrpo.play.endpoints import Endpoint
from verl_atgrpo.tools import Reply, Tool

THINGS = ("lamp", "rope", "kettle", "violin", "spade", "candle")


@dataclass(frozen=True)
class Purchase:
    """What is bought, its price, and what its delivery costs."""

    thing: str
    price: int
    delivery: int


class Prices(Environment):
    """A worker finds the price of a thing by a tool; a teller says what it costs with its delivery."""

    agents: ClassVar[tuple[str, ...]] = ("worker", "teller")

    def task(self, split: Split, index: int) -> Purchase:
        """Returns purchase `index` of `split`, which has prices of its own."""
        rng = random.Random(stable_hash("prices", split, index))
        return Purchase(rng.choice(THINGS), rng.choice(part_of(range(2, 100), split)), rng.randint(2, 99))

    def fingerprint(self, task: Purchase) -> str:
        """Returns all of the purchase."""
        return f"{task.thing}, {task.price}, {task.delivery}"

    def task_key(self, task: Purchase) -> str:
        """Returns the price, which decides the split."""
        return str(task.price)

    def worker_prompt(self, task: Purchase) -> str:
        """Returns what the worker is asked."""
        return f"price of {task.thing}?"

    def teller_prompt(self, price: str, task: Purchase) -> str:
        """Returns what the teller is asked, after the worker's answer."""
        return f"{price[:8]}+{task.delivery}=?"

    def score(self, task: Purchase, agent: str, messages: Sequence[Message], reply: Reply) -> Score:
        """Scores a call by its argument, and an answer by its number."""
        said = read_number(reply.text)
        if agent == "teller":
            return Score(team=float(said is not None and said.value == task.price + task.delivery))
        if any(message["role"] == "tool" for message in messages):
            return Score(local=float(said is not None and said.value == task.price))
        asked = [json.loads(call.arguments) for call in reply.calls if call.name == "price_of"]
        return Score(local=0.2 * bool(asked) + 0.8 * ({"thing": task.thing} in asked))

    async def run(self, task: Purchase, team: Team) -> Outcome:
        """Plays a purchase; success means that the teller says the right sum."""

        def price_of(thing: str) -> int:
            """Returns the price of a thing."""
            if thing != task.thing:
                raise ModelRetry(f"nobody asks for {thing[:20]}")
            return task.price

        async with (
            team.serve(functools.partial(self.score, task), max_turns=3) as urls,
            urls["worker"].client() as first,
            urls["teller"].client() as second,
        ):
            worker = Agent(_model(urls["worker"], first), tools=[price_of], retries=1)
            teller = Agent(_model(urls["teller"], second))
            try:
                found = await worker.run(self.worker_prompt(task))
                told = await teller.run(self.teller_prompt(found.output.strip(), task))
            except (UnexpectedModelBehavior, ModelAPIError):  # no text, or no usable call, in three turns
                return Outcome(False)
        said = read_number(told.output)
        right = said is not None and said.value == task.price + task.delivery
        return Outcome(right, float(right))


def _model(endpoint: Endpoint, client: AsyncOpenAI) -> OpenAIChatModel:
    return OpenAIChatModel(endpoint.model, provider=OpenAIProvider(openai_client=client))


_TAGS = ("<tool_call>", "</tool_call>")
_BEGIN, _END = '{"name": "price_of", "arguments": {"thing": "', '"}}'


def demonstrate(env: Prices, rng: random.Random, noise: float) -> Demonstration:
    """Returns a worker's call, its answer, or a teller's sum; with probability `noise` a thing or digit is random."""
    task = env.task("train", rng.randrange(10**6))
    kind = rng.choice(("call", "answer", "sum"))
    if kind == "sum":
        asked = [{"role": "user", "content": env.teller_prompt(str(task.price), task)}]
        return Demonstration(asked, *write(unsure(str(task.price + task.delivery), noise, DIGITS), rng))
    tools = [Tool("price_of", "", {"properties": {"thing": {}}})]
    asked = [{"role": "user", "content": env.worker_prompt(task)}]
    if kind == "call":
        said = {thing: noise / len(THINGS) + (1 - noise) * (thing == task.thing) for thing in THINGS}
        call = [{"<tool_call>": 1.0}, {_BEGIN: 1.0}, said, {_END: 1.0}, {"</tool_call>": 1.0}]
        return Demonstration(asked, *write(call, rng), tools)
    called = {"function": {"name": "price_of", "arguments": json.dumps({"thing": task.thing})}}
    asked += [
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": str(task.price)},
    ]
    return Demonstration(asked, *write(unsure(str(task.price), noise, DIGITS), rng), tools)


SHOWN = Demonstrator(
    "typed_tool:Prices",
    {},
    demonstrate,
    response_length=6,
    words=(*_TAGS, _BEGIN, _END, "price_of", "price of ", *THINGS),
    training={"clean_steps": 700, "noise": 0.3},
)
