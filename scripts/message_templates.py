"""Extracts the messages in a module's source, with holes for values.

Tests compare the messages that the documentation quotes with these.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

_HOLE = "\0"
_ENOUGH = 0.16
"""The least share of a message's letters that a template has itself: one with few would fit anything."""


@dataclass(frozen=True)
class Template:
    """A message with holes."""

    text: str

    @property
    def readable(self) -> str:
        """The message with dots for holes."""
        return self.text.replace(_HOLE, "…")

    def fits(self, message: str) -> bool:
        """Returns whether some values give `message`, most of which is the template's own."""
        own, whole = (sum(map(str.isalpha, text)) for text in (self.text, message))
        return own >= _ENOUGH * whole and self._pattern.fullmatch(message) is not None

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(".+".join(map(re.escape, self.text.split(_HOLE))), re.DOTALL)


def templates_of(source: str) -> Iterator[Template]:
    """Yields the templates of a module's strings."""
    tree = ast.parse(source)
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    inside = {part for node in joined for part in node.values}
    for node in joined:
        yield Template("".join(str(one.value) if isinstance(one, ast.Constant) else _HOLE for one in node.values))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            yield Template(re.sub("%[sdr]", _HOLE, node.value))  # as in logging calls
