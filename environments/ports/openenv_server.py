"""OpenEnv servers, which run somewhere or are started by this process and end with it, and their sessions.

A session is a WebSocket (openenv.core.env_client in 0.10.0 and 0.3.0). A message is {"type": "reset" or "step",
"data": ...}; the answer has the type "observation", or "error" with a code.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

import aiohttp

from verl_atgrpo import EpisodeFailed
from verl_atgrpo.environments.ports.foreign import line

_LAUNCH = Path(__file__).with_name("openenv_launch.py")
_START_SECONDS = 300.0
"""For importing the app, on a busy machine."""
_UNTOUCHED = "VALIDATION_ERROR"
"""Code of an action that the server could not read, so that its environment did not see it."""
_GOES_ON = (_UNTOUCHED, "EXECUTION_ERROR")
"""Codes after which the session is still open."""
_PAUSE = 0.1
"""Seconds between two tries to get one of the server's sessions."""
_MOST_BYTES = 100 << 20
"""Of an observation, as for their client."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(eq=False)
class Server:
    """An OpenEnv server; one of ours is started when first needed, and again after it ended."""

    where: str
    """The option that names it, with its value, for messages."""
    address: str | None
    """Where it runs; None to start `app`."""
    app: str | None
    """As "module:app"."""
    python: str | None
    """The interpreter that has its package; None for this one."""
    folder: str | None
    """In which it runs, and from which it imports; None for this one."""
    variables: tuple[tuple[str, str], ...]
    """Of its process's environment, beside ours."""
    process: subprocess.Popen[str] | None = None
    _port: str = ""
    _log: IO[bytes] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.python and os.sep in self.python:  # its whole path, as the process starts in another folder
            self.python = os.path.abspath(self.python)

    def url(self) -> str:
        """Returns its address; raises EpisodeFailed if it does not start."""
        if self.address is not None:
            return self.address.rstrip("/")
        with self._lock:
            if self.process is None or self.process.poll() is not None:
                self._start()
            return f"http://127.0.0.1:{self._port}"

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process)
        python = self.python or sys.executable
        try:
            self.process = subprocess.Popen(
                # Its source, as the folder of a script comes first in sys.path, and ours has an openenv.py.
                [python, "-c", _LAUNCH.read_text(), str(self.app)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                cwd=self.folder,
                env={**os.environ, **dict(self.variables)},
                start_new_session=True,  # not interrupted by Ctrl-C
            )
        except OSError as error:
            place = f"by python={python} in folder={os.path.abspath(self.folder or '.')}"
            raise EpisodeFailed("openenv", f"{self.where} cannot be started {place}: {line(error)}") from error
        assert self.process.stdout is not None
        late = threading.Timer(_START_SECONDS, self.process.kill)
        late.start()
        self._port = self.process.stdout.readline().strip()
        if not self._port:
            self.process.wait()
        late.cancel()
        if not self._port:
            raise self.failed("did not start")

    def failed(self, what: str) -> EpisodeFailed:
        """Returns the failure of an episode: what the server did, and how its process ended and with which words."""
        parts = [what]
        if self.process is not None and self._log is not None:
            if (status := self.process.poll()) is not None:
                parts.append(f"its process ended with status {status}")
            # Not by seek: the server writes where our file is.
            end = os.pread(self._log.fileno(), 4096, max(0, os.fstat(self._log.fileno()).st_size - 4096))
            lines = end.decode("utf-8", "replace").splitlines()
            parts += [f"its log ends with {' '.join(text.split())[:200]}" for text in lines[-1:]]
        return EpisodeFailed("openenv", f"{self.where} {'; '.join(parts)}")

    def ask(self, path: str, body: object = None, *, seconds: float) -> Any:
        """Returns the JSON at a path (POST with a body), outside of any session; it waits.

        Raises EpisodeFailed if there is no answer in time, or another status than 200.
        """
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url() + path, data, {"Content-Type": "application/json"})
        try:
            with _DIRECT.open(asked, timeout=seconds) as answer:
                return json.load(answer)
        except (OSError, HTTPException, ValueError) as error:
            raise self.failed(f"does not answer to {path}: {line(error)}") from error


@functools.cache
def server_of(owner: int, *named: Any) -> Server:
    """Returns the server of a process for these arguments of `Server`: all its environments share it.

    Args:
        owner: the process, as a fork must not take its parent's server for its own.
        named: arguments of `Server`.
    """
    return Server(*named)


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


@dataclass(eq=False)
class Session:
    """One environment of a server, for one episode; connected at the first reset, and at one after the session ended.

    As a context manager it closes the session at its end. One message at a time.
    """

    server: Server
    seconds: float
    """For every answer."""
    sessions: int
    """That this process may have of the server at once, for a message."""
    _socket: aiohttp.ClientWebSocketResponse | None = None
    """None also while an answer is awaited: what a failed or cancelled call leaves behind is not used again."""
    _next: asyncio.Task[aiohttp.WSMessage] | None = None
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
        until = loop.time() + self.seconds
        while True:
            if self._socket is None:
                await self._connect()
            try:
                return await self._ask("reset", data)
            except Refusal as refusal:
                most = refusal.most_sessions
                if isinstance(most, int) and most < self.sessions:
                    raise self.server.failed(
                        f"plays {most} at once: set at_grpo.environment.sessions={most}, less than {self.sessions}, "
                        "or have its create_app get a higher max_concurrent_envs"
                    ) from None
                if most is None or loop.time() > until:
                    raise self.server.failed(f"refuses to reset: {refusal}") from None
            await asyncio.sleep(_PAUSE)

    async def step(self, action: Mapping[str, Any]) -> Result:
        """Plays an action; raises Refusal if the server answers with an error, EpisodeFailed if with nothing."""
        return await self._ask("step", action)

    async def _connect(self) -> None:
        url = await asyncio.to_thread(self.server.url)  # may start it
        try:
            self._socket = await asyncio.wait_for(
                self._http.ws_connect(f"{url}/ws", max_msg_size=_MOST_BYTES), self.seconds
            )
        except (OSError, aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise self.server.failed(f"does not connect: {line(error)}") from error
        self._next = asyncio.create_task(self._socket.receive())

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Result:
        socket, incoming = self._socket, self._next
        assert socket is not None and incoming is not None
        self._socket = None
        with contextlib.suppress(ConnectionError):  # why it is closed may have been said before
            await socket.send_str(json.dumps({"type": kind, "data": data}))
        await asyncio.wait([incoming], timeout=self.seconds)
        if not incoming.done():
            raise self.server.failed(f"does not answer to {kind} within {self.seconds:g} s")
        if incoming.result().type is not aiohttp.WSMsgType.TEXT:
            raise self.server.failed(f"has closed the connection before it answered to {kind}")
        try:
            answer = json.loads(incoming.result().data)
            refusal = Refusal(answer["data"]) if answer["type"] == "error" else None
            result = Result.of(answer["data"]) if refusal is None else None
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise self.server.failed(f"does not answer to {kind} as OpenEnv does: {line(error)}") from error
        if refusal is None or refusal.code in _GOES_ON:
            self._socket, self._next = socket, asyncio.create_task(socket.receive())
        else:
            await socket.close()
        if result is None:
            assert refusal is not None
            raise refusal
        return result
