"""Plan-Path's team behind the agents' endpoints, each asked by the OpenAI client."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from verl_atgrpo import Message, Outcome, Score, Team
from verl_atgrpo.environments.common.drafting import Draft
from verl_atgrpo.environments.plan_path import PlanPath
from verl_atgrpo.environments.plan_path.grid import PlanPathTask
from verl_atgrpo.play.messages import Reply


class ServedPlanPath(PlanPath):
    """The environment `plan_path`, played by completions; nothing else differs."""

    async def run(self, task: PlanPathTask, team: Team) -> Outcome:
        """Plays one episode."""
        state, turns = self.initial(task), 0

        def score(agent: str, messages: Sequence[Message], reply: Reply) -> Score:
            return self.score_reply(state, reply.text)

        async with AsyncExitStack() as stack:
            urls = await stack.enter_async_context(team.serve(score))

            clients = {agent: await stack.enter_async_context(url.client()) for agent, url in urls.items()}

            async def ask(agent: str, messages: Sequence[Message]) -> str:
                answer = await clients[agent].chat.completions.create(model=agent, messages=list(messages))
                return answer.choices[0].message.content or ""

            while turns < self.max_turns and not state.solved:
                draft = await ask("tool_user", self.draft_prompt(state))
                said = await ask("planner", self.plan_prompt(state, Draft(draft, self.parse(draft))))
                answer = self.parse(said)
                state = state if answer is None else self.apply(state, answer)
                turns += 1
        return self.outcome(state, turns)
