"""Tools for agents: typed functions, JSON schemas and MCP servers. `tool_use` has the loop that calls them."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from verl_atgrpo.play.user_code import Ended, contained

ToolSource: TypeAlias = "Callable[..., Any] | Mapping[str, Any] | Tool"
"""A typed function, sync or async; an OpenAI schema `{"type": "function", "function": {...}}`; or a `Tool`."""
SHOWN = 300
"""Most characters of an error in an observation."""


class ToolError(ValueError):
    """A tool, or the policy that is to call it, cannot be used; ends the run."""


@dataclass(frozen=True)
class Tool:
    """A function that a model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments."""
    function: Callable[[str], Awaitable[str]] | None = None
    """JSON arguments -> result; None for a schema without a function, whose calls the environment handles."""
    in_order: bool = False
    """Whether calls run one after another, as coroutine functions may make decisions, which are numbered by start."""

    @classmethod
    def of(cls, source: ToolSource) -> Tool:
        """Makes a tool of a function or a schema.

        A function's name and docstring are the tool's; its arguments are validated by their types before it is called.
        A sync one runs in a thread. What it returns is given to the model as text, or as JSON if it is no text.

        Raises ToolError if it is neither, or a function whose arguments have no types.
        """
        if isinstance(source, Tool):
            return source
        if isinstance(source, Mapping):
            return _of_schema(source)
        if not callable(source) or isinstance(source, type):
            raise ToolError(f"{source!r} is no tool: use a typed function or an OpenAI schema of one")
        # Here, because environments without tools are imported by programs that need no pydantic.
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticUserError
        from pydantic_core import to_jsonable_python

        own = inspect.unwrap(source)
        while isinstance(own, functools.partial):
            own = own.func
        name = getattr(own, "__name__", type(own).__name__)
        untyped = [
            parameter.name
            for parameter in inspect.signature(source).parameters.values()
            if parameter.annotation is inspect.Parameter.empty
        ]
        if untyped:
            raise ToolError(f"the tool {name!r} has arguments without types: {', '.join(untyped)}")
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(cast(Any, source))
            parameters = adapter.json_schema()
        except PydanticUserError as error:
            raise ToolError(f"the tool {name!r}: {str(error).splitlines()[0]}") from error

        decides = inspect.iscoroutinefunction(inspect.unwrap(source))

        async def call(arguments: str) -> str:
            run = functools.partial(adapter.validate_json, arguments or "{}")
            result = run() if decides else await _in_thread(run)
            if inspect.isawaitable(result):  # of a decorated coroutine function, too
                result = await result
            if isinstance(result, str):
                return result
            return json.dumps(to_jsonable_python(result, fallback=str), ensure_ascii=False)

        return cls(name, inspect.getdoc(own) or "", _untitled(parameters), call, in_order=decides)

    @property
    def schema(self) -> dict[str, Any]:
        """Its schema in OpenAI's form, as chat templates read it."""
        of_function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": of_function}


async def _in_thread(run: Callable[[], Any]) -> Any:
    """Runs a sync tool in a thread of its own.

    Not in a pool: tools that hang would fill it. And not in asyncio's, which waits for them when the process ends.
    """
    done: Future[Any] = Future()

    def work() -> None:
        try:
            with contained("the tool"):
                result = run()
        except StopIteration as error:  # no future takes it
            done.set_exception(Ended(f"the tool raised StopIteration: {error}"))
        except BaseException as error:  # noqa: BLE001  (raised again where it is awaited)
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=work, name="tool", daemon=True).start()
    return await asyncio.shield(asyncio.wrap_future(done))


def tools_of(sources: Sequence[ToolSource]) -> tuple[Tool, ...]:
    """Returns the tools of an agent.

    Raises ToolError if two have the same name, or as `Tool.of`.
    """
    tools = tuple(map(Tool.of, sources))
    counts = Counter(tool.name for tool in tools)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ToolError(f"two tools have the name {min(twice)!r}")
    return tools


def _of_schema(schema: Mapping[str, Any]) -> Tool:
    function = schema.get("function") if schema.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ToolError(f'{str(dict(schema))[:SHOWN]} is no tool: {{"type": "function", "function": {{"name": ...}}}}')
    return Tool(
        function["name"],
        function.get("description") or "",
        function.get("parameters") or {"type": "object", "properties": {}},
    )


def _untitled(schema: Any) -> Any:
    """Returns a JSON schema without pydantic's titles, which repeat the names of arguments."""
    if isinstance(schema, list):
        return [_untitled(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    # `title` is a text; an argument of that name has a schema.
    return {key: _untitled(part) for key, part in schema.items() if not (key == "title" and isinstance(part, str))}


async def mcp_tools(client: Any) -> list[Tool]:
    """Returns the tools of an MCP server.

    Args:
        client: a connected `mcp.Client` (or a `ClientSession` of mcp 1).
    """

    def function(name: str) -> Callable[[str], Awaitable[str]]:
        async def call(arguments: str) -> str:
            given = json.loads(arguments or "{}")
            if not isinstance(given, dict):
                raise ValueError("the arguments are no JSON object")
            # Fields have the protocol's names in every version of the package.
            result = (await client.call_tool(name, given)).model_dump(by_alias=True)
            text = "\n".join(part["text"] for part in result["content"] if part["type"] == "text")
            if result.get("isError"):
                raise RuntimeError(text)
            return text

        return call

    found: list[Tool] = []
    cursor = None
    while True:
        page = (await client.list_tools(cursor=cursor)).model_dump(by_alias=True)
        for one in page["tools"]:
            schema = _untitled(one["inputSchema"])
            found.append(Tool(one["name"], one["description"] or "", schema, function(one["name"])))
        cursor = page.get("nextCursor")
        if cursor is None:
            return found
