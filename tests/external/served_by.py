"""Loaded into a job by VERL_USE_EXTERNAL_MODULES: keeps which server answered what, in the file SERVED_FILE."""

from __future__ import annotations

import json
import os
from types import ModuleType
from typing import Any

from verl_atgrpo.import_hooks import when_imported


def _record(client: ModuleType) -> None:
    attempt = client.DecisionClient.attempt

    async def recording(self: Any, server: Any, request_id: str, *arguments: Any) -> Any:
        output = await attempt(self, server, request_id, *arguments)
        served = {
            "server": server._actor_id.hex(),
            "decision": request_id,
            "weights": output.extra_fields["global_steps"],
        }
        with open(os.environ["SERVED_FILE"], "a") as file:
            file.write(json.dumps(served) + "\n")
        return output

    client.DecisionClient.attempt = recording


when_imported("verl_atgrpo.rollout.client", _record)
