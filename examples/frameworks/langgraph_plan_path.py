"""Plan-Path's team as a LangGraph graph: a node drafts, a node decides, until the walker is at the goal.

    PYTHONPATH=examples/frameworks python -m verl.trainer.main_ppo \\
        --config-dir=examples/frameworks --config-name=langgraph_cpu

The graph knows nothing of training: its nodes ask chat models whose addresses `team.serve` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

from verl_atgrpo import Message, Outcome, Score, Team
from verl_atgrpo.environments.common.drafting import Draft
from verl_atgrpo.environments.plan_path import PlanPath
from verl_atgrpo.environments.plan_path.grid import PlanPathTask, State
from verl_atgrpo.tools import Reply


class Walk(TypedDict):
    """The graph's state."""

    state: State
    draft: str
    turns: int


class PlanPathGraph(PlanPath):
    """The environment `plan_path`, played by a graph."""

    async def run(self, task: PlanPathTask, team: Team) -> Outcome:
        """Plays one episode; success means that the task is solved within the turns."""
        now = self.initial(task)

        def score(agent: str, messages: Sequence[Message], reply: Reply) -> Score:
            return self.score_reply(now, reply.text)

        async with team.serve(score) as urls:
            models = {
                agent: ChatOpenAI(model=agent, base_url=url.base_url, api_key=url.api_key, timeout=None)
                for agent, url in urls.items()
            }

            async def draft(walk: Walk) -> dict[str, Any]:
                said = await models["tool_user"].ainvoke(self.draft_prompt(walk["state"]))
                return {"draft": said.content}

            async def plan(walk: Walk) -> dict[str, Any]:
                nonlocal now
                drafted = Draft(walk["draft"], self.parse(walk["draft"]))
                said = await models["planner"].ainvoke(self.plan_prompt(walk["state"], drafted))
                answer = self.parse(said.content)
                now = walk["state"] if answer is None else self.apply(walk["state"], answer)
                return {"state": now, "turns": walk["turns"] + 1}

            def more(walk: Walk) -> str:
                return END if walk["state"].solved or walk["turns"] == self.max_turns else "draft"

            graph = StateGraph(Walk)
            graph.add_node("draft", draft)
            graph.add_node("plan", plan)
            graph.add_edge(START, "draft")
            graph.add_edge("draft", "plan")
            graph.add_conditional_edges("plan", more)
            ended = await graph.compile().ainvoke({"state": now, "draft": "", "turns": 0})
        return self.outcome(ended["state"], ended["turns"])
