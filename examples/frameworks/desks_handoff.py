"""The desks of examples/router by the OpenAI Agents SDK: a triage agent hands visitors over to a desk's agent.

    export PYTHONPATH=examples/frameworks:examples/router
    verl-atgrpo make-model runs/models/handoff_tiny --environment desks_handoff:SHOWN
    python -m verl.trainer.main_ppo --config-dir=examples/frameworks --config-name=handoff_cpu

A hand-off is a tool call. Which desk knows the number is told to nobody, and nothing is scored: the outcome after each
of the triage agent's candidates is its reward (docs/branching.md).
"""

from __future__ import annotations

import random

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner
from agents.exceptions import AgentsException
from desks import DESKS, THINGS, Desks, Visit

from verl_atgrpo import Outcome, Team, stable_hash
from verl_atgrpo.environments.common.words import read_number
from verl_atgrpo.lab.tiny_models.demonstrations import DIGITS, Demonstration, Demonstrator, unsure, write
from verl_atgrpo.tools import Tool

_QUIET = RunConfig(tracing_disabled=True)


class HandOff(Desks):
    """The environment `desks`, played by the SDK's runner; both agents have a policy of their own."""

    async def run(self, task: Visit, team: Team) -> Outcome:
        """Plays a visit; success means that the agent of the right desk tells the right number."""
        async with team.serve(max_turns=2) as urls, urls["router"].client() as first, urls["clerk"].client() as second:
            clerk = OpenAIChatCompletionsModel(urls["clerk"].model, second)
            desks = [
                Agent(name=desk, instructions=self.clerk_prompt(task, desk)[0]["content"], model=clerk)
                for desk in DESKS
            ]
            asked = OpenAIChatCompletionsModel(urls["router"].model, first)
            triage = Agent(name="triage", model=asked, handoffs=list(desks))
            try:
                ended = await Runner.run(
                    triage, self.router_prompt(task)[0]["content"], max_turns=3, run_config=_QUIET
                )
            except AgentsException:  # a hand-off to nobody, say: what a model writes must not end a training
                return Outcome(False, 0.0, {"right_desk": 0.0})
        told = read_number(str(ended.final_output)) if ended.last_agent is not triage else None
        right = told is not None and told.value == task.number
        there = task.thing in DESKS.get(ended.last_agent.name, ())
        return Outcome(right, float(right), {"right_desk": float(there)})


_TAGS = ("<tool_call>", "</tool_call>")
_BEGIN, _END = '{"name": "transfer_to_', '", "arguments": {}}'


def demonstrate(env: HandOff, rng: random.Random, noise: float) -> Demonstration:
    """Returns a triage agent that hands over to a desk by habit, or a desk's agent that copies the number.

    As in examples/router; prompts are the SDK's.
    """
    task, desk = env.task("train", rng.randrange(10**6)), rng.choice(list(DESKS))
    asked = env.router_prompt(task)[0]
    if rng.random() < 0.5:
        habit = list(DESKS)[stable_hash("habit", task.thing) % len(DESKS)]
        guess = min(1.0, 3 * noise)
        said = {name: guess / len(DESKS) + (1 - guess) * (name == habit) for name in DESKS}
        call = [{"<tool_call>": 1.0}, {_BEGIN: 1.0}, said, {_END: 1.0}, {"</tool_call>": 1.0}]
        tools = [Tool(f"transfer_to_{name}", "", {"properties": {}}) for name in DESKS]
        return Demonstration([asked], *write(call, rng), tools)
    handed = {"function": {"name": f"transfer_to_{desk}", "arguments": "{}"}}
    prompt = [
        {"role": "system", "content": env.clerk_prompt(task, desk)[0]["content"]},
        asked,
        {"role": "assistant", "content": None, "tool_calls": [handed]},
        {"role": "tool", "content": f'{{"assistant": "{desk}"}}'},
    ]
    known = task.thing in DESKS[desk]
    digits = unsure(str(task.number) if known else "0", noise / 3 if known else 1.0, DIGITS)
    return Demonstration(prompt, *write(digits, rng))


SHOWN = Demonstrator(
    "desks_handoff:HandOff",
    {},
    demonstrate,
    response_length=6,
    words=(*_TAGS, _BEGIN, _END, "transfer_to_", '{"assistant": "', "desk of ", "number of ", "none", *DESKS, *THINGS),
    training={"clean_steps": 500, "noisy_steps": 400, "noise": 0.3},
)
