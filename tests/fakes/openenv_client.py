"""Plays actions with OpenEnv's own client, in an interpreter that has it: JSON in, rewards as hexadecimals out."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openenv.core.generic_client import GenericEnvClient


async def played(url: str, seed: int, actions: list[dict[str, Any]]) -> list[str]:
    async with GenericEnvClient(base_url=url) as client:
        await client.reset(seed=seed)
        return [(await client.step(action)).reward.hex() for action in actions]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(played(*json.load(sys.stdin)))))
