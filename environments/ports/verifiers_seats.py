"""What makes a seat of a verifiers environment an agent of ours: its model's client, and a chat without processes.

Importing this imports verifiers, which takes seconds.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai
from verifiers.v1.clients import EvalClient
from verifiers.v1.clients.client import RelayReply
from verifiers.v1.dialects.base import parse_sse_event
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import MODEL_TRANSPORT_ERROR_EXIT_CODE
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils import compaction, core, mcp
from verifiers.v1.interception import Interception
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig
from verifiers.v1.types import Response

from verl_atgrpo.play.endpoints import Endpoint

Names = dict[str, list[str]]
"""Id of a run -> the names of its decisions."""


def take(agent: Any, endpoint: Endpoint, names: Names) -> None:
    """Makes an agent of an episode ask an endpoint, and notes the decisions of its runs."""
    agent.interception = _Line(agent.interception, endpoint, names)
    if type(agent.harness) is NullHarness and isinstance(agent.runtime_config, SubprocessConfig):
        agent.harness = InProcessChat(agent.harness.config)


class _Line(Interception):  # type: ignore[misc]  # verifiers is not there in every check
    """The environment's interception, for one agent."""

    def __init__(self, through: Any, endpoint: Endpoint, names: Names) -> None:
        super().__init__()
        self._through, self._endpoint, self._names = through, endpoint, names

    async def start(self) -> None:
        """Does nothing: the environment has started it."""

    @asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[Any]:
        """Registers a run, whose model is the endpoint then."""
        async with self._through.acquire(session) as slot:
            noted = self._names.setdefault(session.trace.id, [])
            session.client = _Client(session.client.client, self._endpoint, noted)
            yield slot


class _Client(EvalClient):  # type: ignore[misc]
    """Asks an endpoint, and notes the names of decisions, with which the ids of its completions end."""

    def __init__(self, http: Any, endpoint: Endpoint, names: list[str]) -> None:
        """Uses the connections of the interception; verifiers' own client reads a key from the process's variables."""
        self.client, self.names = http, names
        self.headers: dict[str, str] = {}
        self.base_url, self.api_key = endpoint.base_url, endpoint.api_key

    async def get_response(self, *args: Any, **options: Any) -> Response:
        """Returns a completion."""
        response = await super().get_response(*args, **options)
        self._note(response.id)
        return response

    async def relay(self, *args: Any, **options: Any) -> RelayReply:
        """Returns a streamed completion."""
        reply = await super().relay(*args, **options)
        reply.chunks = self._noted(reply.chunks)
        return reply

    async def _noted(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        first = True
        async for chunk in chunks:
            if first:
                self._note((parse_sse_event(chunk) or {}).get("id", ""))
            first = False
            yield chunk

    def _note(self, identifier: str) -> None:
        self.names.append(identifier.partition(":")[2])


def _joined() -> Any:
    """Returns the module of verifiers' chat loop, complete: it is made to be pasted together with two others."""
    for module, names in (
        (mcp, ("call_mcp", "connect_mcp")),
        (compaction, ("Compactor", "bound_tool_message", "compactable", "estimated_tokens", "is_context_overflow")),
    ):
        for name in names:
            vars(core).setdefault(name, getattr(module, name))
    vars(compaction).setdefault("chat", core.chat)
    return core


class InProcessChat(NullHarness):  # type: ignore[misc]
    """verifiers' harness `null` with its own loop, in this process.

    As a program it is a new process in each turn, which takes a second, and needs uv and the internet.
    """

    async def setup(self, runtime: Any) -> None:
        """Does nothing: there is no program to install."""

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Chats until a reply calls no tool."""
        loop = _joined()
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += map(message_to_wire, prompt or ())
        given = {"tool_interception_url": tool_interception_url, "api_key": secret}
        args = Namespace(bash=False, edit=False, search=False, **given)
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        http = openai.DefaultAsyncHttpxClient(verify=False, timeout=None)
        asked = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None, max_retries=0, http_client=http)
        async with asked as client, AsyncExitStack() as stack:
            connected = await loop.connect_mcp({"mcpServers": servers}, stack, set()) if servers else ([], {}, {})
            tools, dispatch, clients = connected
            compactor = loop.Compactor(client, ctx.model, tools, False, None)
            try:
                await loop.run_chat_loop(args, compactor, messages, dispatch, clients, http)
            except SystemExit:
                return ProgramResult(MODEL_TRANSPORT_ERROR_EXIT_CODE, "", "no connection")
            except openai.APIError as error:
                return ProgramResult(1, "", f"{type(error).__name__}: {error}")
        return ProgramResult(0, "", "")
