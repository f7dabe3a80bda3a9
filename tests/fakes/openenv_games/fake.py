"""A server of the games that speaks as OpenEnv's do (`exchange.json`), without its package: an ASGI app."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import games

KNOWN = json.loads(Path(__file__).with_name("exchange.json").read_text())
NOTE = {"metadata": {"note": "not for agents"}}
SESSIONS = 4
open_sessions = 0


def told(answer: games.Answer) -> dict[str, Any]:
    seen, reward, done = answer
    return {"observation": {**NOTE, **seen}, "reward": reward, "done": done, **NOTE}


class Refused(Exception):
    """An answer with an error of this code."""


def checked(game: Any, action: dict[str, Any]) -> Any:
    (value,) = action.values()
    kind = int if isinstance(game, games.Guessing) else str
    if type(value) is not kind or (kind is int and value < 0):
        raise Refused("VALIDATION_ERROR")
    if value == games.UNLUCKY:
        raise Refused("SESSION_ERROR")
    return value


def answered(game: Any, message: dict[str, Any]) -> dict[str, Any]:
    if message["type"] == "reset":
        return told(game.reset(**message["data"]))
    value = checked(game, message["data"])
    if value == 666:
        os._exit(3)
    try:
        return told(game.step(value))
    except (KeyError, ValueError) as error:
        raise Refused("EXECUTION_ERROR") from error


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        return
    name = scope["path"].strip("/").rpartition("/")[0]
    game = {"nim": games.Nim, "noisy": games.Noisy, "late": games.Late}.get(name, games.Guessing)()
    path = scope["path"].removeprefix(f"/{name}" if name else "")
    if scope["type"] == "websocket":
        await session(game, 1 if name == "single" else SESSIONS, receive, send)
        return
    asked = (await receive()).get("body") or b"{}"
    known = KNOWN["/nim" if name == "nim" else ""]
    answer = known["schema"] if path == "/schema" else told(game.reset(**json.loads(asked)))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


async def session(game: Any, most: int, receive: Any, send: Any) -> None:
    global open_sessions

    async def say(kind: str, data: dict[str, Any]) -> None:
        await send({"type": "websocket.send", "text": json.dumps({"type": kind, "data": data})})

    async def refuse(code: str, **more: Any) -> None:
        await say("error", {"message": "no", "code": code, **more})

    await receive()
    await send({"type": "websocket.accept"})
    if open_sessions >= most:
        await refuse("CAPACITY_REACHED", active_sessions=open_sessions, max_sessions=most)
        await send({"type": "websocket.close"})
        return
    open_sessions += 1
    try:
        while (event := await receive())["type"] == "websocket.receive":
            message = json.loads(event["text"])
            if message["type"] == "close":
                break
            if message["data"] == {"number": 404}:  # never answers
                continue
            try:
                await say("observation", answered(game, message))
            except Refused as refused:
                await refuse(str(refused))
                if str(refused) == "SESSION_ERROR":
                    break
        if event["type"] != "websocket.disconnect":
            await send({"type": "websocket.close"})
    finally:
        open_sessions -= 1
