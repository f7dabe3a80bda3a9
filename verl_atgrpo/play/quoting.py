"""How prompts quote what agents wrote: bounded, and shorter where a prompt is too long for its policy.

    await team.checker.act(lambda: f"{question}\\nA draft:\\n{quoted(shortened(draft.text))}\\nIs it right?", score)

A prompt that is given as a function is made again, with quotes half as long, while the policy cannot take it. So no
reply, however many tokens it takes when it is quoted, costs the next agent's episode.
"""

from __future__ import annotations

import contextvars
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.0)
"""Of their lengths that quotes have, one after the other, while a prompt is too long."""
READ = 20_000
"""Characters of a reply, from its end, that are read: as many as 5,000 tokens of prose or code have."""
SHOWN = 1500
"""Characters of an earlier reply, from its end, that prompts show."""
_EMPTY_LINES = re.compile(r"\n(?:[ \t]*[\r\n\x0b\x0c\x1c-\x1e\x85\u2028\u2029]){2,}")
_SHARE: contextvars.ContextVar[float] = contextvars.ContextVar("share", default=1.0)


@contextmanager
def sharing(share: float) -> Iterator[None]:
    """Makes quotes of a block have a share of their length."""
    before = _SHARE.set(share)
    try:
        yield
    finally:
        _SHARE.reset(before)


def shortened(text: str, most: int = SHOWN) -> str:
    """Returns the last `most` characters of an earlier reply, for a prompt; fewer if the prompt was too long."""
    left = len(text) - int(most * _SHARE.get())
    return text if left <= 0 else f"[...]{text[left:]}"


def quoted(text: str, most: int = READ) -> str:
    """Returns `text` quoted for a prompt, `> ` before every line: no label, grid or block in it is read.

    Several empty lines become one: a model that repeats line breaks would make the next agent's prompt too long. At
    most so many characters are quoted as in `shortened`.
    """
    tidied = _EMPTY_LINES.sub("\n\n", text.strip("\r\n"))
    return textwrap.indent(shortened(tidied, most), "> ", lambda line: True)
