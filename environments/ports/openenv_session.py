"""A session of an OpenEnv server: the protocol of its WebSocket (openenv.core.env_client in 0.10.0 and 0.3.0).

A message is {"type": "reset" or "step", "data": ...}; the answer has the type "observation", or "error" with a code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from verl_atgrpo.environments.ports.foreign import line
from verl_atgrpo.environments.ports.openenv_server import Server

_UNTOUCHED = "VALIDATION_ERROR"
"""Code of an action that the server could not read, so that its environment did not see it."""
_GOES_ON = (_UNTOUCHED, "EXECUTION_ERROR")
"""Codes after which the session is still open."""
_PAUSE = 0.1
"""Seconds between two tries to get one of the server's sessions."""
_MOST_BYTES = 100 << 20
"""Of an observation, as for their client."""


class Refusal(Exception):
    """The server answers with an error."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.code = str(data.get("code"))
        self.most_sessions = data.get("max_sessions")
        super().__init__(" ".join(f"{self.code}: {data.get('message')}".split())[:200])

    @property
    def untouched(self) -> bool:
        """Whether the environment is where it was."""
        return self.code == _UNTOUCHED


@dataclass(frozen=True)
class Result:
    """An answer to reset or step."""

    observation: Mapping[str, Any]
    """Without its metadata, which 0.3.0 does not send and which may hold times and ids."""
    reward: object
    done: bool

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Result:
        """Returns what an answer says; raises LookupError, TypeError or AttributeError if it is none."""
        seen = {name: value for name, value in data["observation"].items() if name != "metadata"}
        return cls(seen, data.get("reward"), bool(data.get("done", False)))


class Session:
    """One environment of a server, for one episode; connected at the first reset, and at one after the session ended.

    As a context manager it closes the session at its end. One message at a time.
    """

    def __init__(self, server: Server, seconds: float, sessions: int) -> None:
        """Prepares the session.

        Args:
            server: where it is.
            seconds: for every answer.
            sessions: that this process may have of the server at once, for a message.
        """
        self._server, self._seconds, self._sessions = server, seconds, sessions
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        """None also while an answer is awaited: what a failed or cancelled call leaves behind is not used again."""
        self._next: asyncio.Task[aiohttp.WSMessage] | None = None
        """Receives the next message. Always running, as aiohttp answers pings only while something receives."""

    async def __aenter__(self) -> Session:
        self._http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._socket is not None:
            with contextlib.suppress(ConnectionError):
                await self._socket.send_json({"type": "close"})
        if self._next is not None:
            self._next.cancel()
        await self._http.close()

    async def reset(self, data: Mapping[str, Any]) -> Result:
        """Begins an episode; waits for a free session if others of the server's are in use.

        Args:
            data: arguments of the environment's `reset`.

        Raises EpisodeFailed if the server does not answer, has no free session in time, or refuses.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._seconds
        while True:
            if self._socket is None:
                await self._connect()
            try:
                return await self._ask("reset", data)
            except Refusal as refusal:
                most = refusal.most_sessions
                if isinstance(most, int) and most < self._sessions:
                    raise self._server.failed(
                        f"plays {most} at once: set at_grpo.environment.sessions={most}, less than {self._sessions}, "
                        "or have its create_app get a higher max_concurrent_envs"
                    ) from None
                if most is None or loop.time() > until:
                    raise self._server.failed(f"refuses to reset: {refusal}") from None
            await asyncio.sleep(_PAUSE)

    async def step(self, action: Mapping[str, Any]) -> Result:
        """Plays an action; raises Refusal if the server answers with an error, EpisodeFailed if with nothing."""
        return await self._ask("step", action)

    async def _connect(self) -> None:
        url = await asyncio.to_thread(self._server.url)  # may start it
        try:
            self._socket = await asyncio.wait_for(
                self._http.ws_connect(f"{url}/ws", max_msg_size=_MOST_BYTES), self._seconds
            )
        except (OSError, aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise self._server.failed(f"does not connect: {line(error)}") from error
        self._next = asyncio.create_task(self._socket.receive())

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Result:
        socket, incoming = self._socket, self._next
        assert socket is not None and incoming is not None
        self._socket = None
        with contextlib.suppress(ConnectionError):  # why it is closed may have been said before
            await socket.send_str(json.dumps({"type": kind, "data": data}))
        await asyncio.wait([incoming], timeout=self._seconds)
        if not incoming.done():
            raise self._server.failed(f"does not answer to {kind} within {self._seconds:g} s")
        if incoming.result().type is not aiohttp.WSMsgType.TEXT:
            raise self._server.failed(f"has closed the connection before it answered to {kind}")
        try:
            answer = json.loads(incoming.result().data)
            refusal = Refusal(answer["data"]) if answer["type"] == "error" else None
            result = Result.of(answer["data"]) if refusal is None else None
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise self._server.failed(f"does not answer to {kind} as OpenEnv does: {line(error)}") from error
        if refusal is None or refusal.code in _GOES_ON:
            self._socket, self._next = socket, asyncio.create_task(socket.receive())
        else:
            await socket.close()
        if result is None:
            assert refusal is not None
            raise refusal
        return result
