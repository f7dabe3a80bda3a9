"""Loaded into a job by VERL_USE_EXTERNAL_MODULES: records the server of every response in the file SERVED_FILE.

KILLED_AT lists versions of the weights: with those, responses after the first ones wait until the test has killed a
server and created the file `<SERVED_FILE>.killed.<version>`, so the death is in the middle of the rollout.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from types import ModuleType
from typing import Any

from verl_atgrpo.compat import when_imported


def _record(requests: ModuleType) -> None:
    from verl_atgrpo.train.serving.balancer import actor_id

    attempt = requests.DecisionClient.attempt
    answered: Counter[int] = Counter()

    def killed(version: int) -> bool:
        return os.path.exists(f"{os.environ['SERVED_FILE']}.killed.{version}")

    async def recording(self: Any, server: Any, request_id: str, *arguments: Any) -> Any:
        output = await attempt(self, server, request_id, *arguments)
        served = {
            "server": actor_id(server),
            "decision": request_id,
            "weights": output.extra_fields["global_steps"],
        }
        with open(os.environ["SERVED_FILE"], "a") as file:
            file.write(json.dumps(served) + "\n")
        if str(served["weights"]) in os.environ["KILLED_AT"].split():
            answered[served["weights"]] += 1
            while answered[served["weights"]] >= 8 and not killed(served["weights"]):
                await asyncio.sleep(0.01)
        return output

    requests.DecisionClient.attempt = recording


# Not the client's module: importing it imports verl, which loads this file.
when_imported("verl_atgrpo.train.serving.requests", _record)
