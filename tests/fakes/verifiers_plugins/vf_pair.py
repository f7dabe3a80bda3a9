"""An environment of two agents for verifiers: a drafter plays the task, and a decider a task made of the draft."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["PairEnv"]


class PairConfig(vf.EnvConfig):
    drafter: vf.AgentConfig = vf.AgentConfig()
    decider: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        draft = await agents.drafter.run(task)
        prompt = f"{task.data.prompt_text}\nDraft: {draft.last_reply}"
        await agents.decider.run(task.with_data(prompt=prompt, system_prompt="Decide."))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        drafted, decided = episode.traces
        drafted.record_reward("helped", decided.reward, weight=0.1)
