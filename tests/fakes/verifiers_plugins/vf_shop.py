"""A taskset for verifiers whose agent looks prices up with a tool."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["ShopTaskset"]


class PriceData(vf.TaskData):
    price: int


class Shop(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = "shop"

    @vf.tool
    async def price(self, thing: str) -> str:
        """Returns the price of a thing."""
        return str(sum(map(ord, thing)))


class PriceTask(vf.Task[PriceData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Shop(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, task: PriceData, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(task.price)) / (1 + len(trace.tool_messages))


class ShopTaskset(vf.Taskset[PriceTask, vf.TasksetConfig]):
    def load(self) -> Iterator[PriceTask]:
        for number in range(30):
            thing = f"thing{number}"
            yield PriceTask(PriceData(prompt=f"What is the price of {thing}?", price=sum(map(ord, thing))))


if __name__ == "__main__":
    Shop.run()
