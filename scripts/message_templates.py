"""Extracts the messages in a module's source, with holes for values.

Tests compare the messages that the documentation quotes with these.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_HOLE = None
Piece = str | None
"""A part of a message, or a hole."""


@dataclass(frozen=True)
class Template:
    """A message with holes."""

    pieces: tuple[Piece, ...]

    @property
    def readable(self) -> str:
        """The message with dots for holes."""
        return "".join("…" if piece is _HOLE else piece for piece in self.pieces)

    @property
    def letters(self) -> int:
        """Number of its fixed letters; with few it would match anything."""
        return sum(character.isalpha() for piece in self.pieces if piece for character in piece)

    def fits(self, message: str) -> bool:
        """Returns whether some values give `message`."""
        return self._pattern.fullmatch(message) is not None

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        pattern = "".join(".+" if piece is _HOLE else re.escape(piece) for piece in self.pieces)
        return re.compile(pattern, re.DOTALL)


def templates_of(source: str, names: Mapping[str, Any], raised: str | None = None) -> Iterator[Template]:
    """Yields the templates of a module's strings, in order.

    Args:
        source: the module's source.
        names: its globals; texts and numbers among them are inserted.
        raised: only messages with which this exception is raised.
    """
    yield from _visit(ast.parse(source), names, raised)


def _visit(node: ast.AST, names: Mapping[str, Any], raised: str | None) -> Iterator[Template]:
    if isinstance(node, ast.FunctionDef):
        names = {**names, **_local_texts(node)}
    if isinstance(node, ast.For) and (rounds := _literal_rounds(node)) is not None:
        for bound in rounds:
            for statement in node.body:
                yield from _visit(statement, {**names, **bound}, raised)
        return
    if raised is None and isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
        found = list(_templates(node, names))
        if found:
            yield from found
            return
    if raised and isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        if ast.unparse(node.exc.func) == raised:
            yield from _templates(node.exc.args[0], names)
        return
    for child in ast.iter_child_nodes(node):
        yield from _visit(child, names, raised)


def _local_texts(function: ast.FunctionDef) -> dict[str, str]:
    """Returns the variables that a function sets to a text, outside of branches."""
    return {
        node.targets[0].id: node.value.value
        for node in function.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def _literal_rounds(loop: ast.For) -> list[dict[str, Any]] | None:
    """Returns the loop variables' values in each round, if they are literals."""
    targets = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
    try:
        values = ast.literal_eval(loop.iter)
    except ValueError:
        return None
    names = [ast.unparse(target) for target in targets]
    return [dict(zip(names, value if len(names) > 1 else (value,), strict=True)) for value in values]


def _templates(node: ast.expr, names: Mapping[str, Any]) -> Iterator[Template]:
    for pieces in _pieces(node, names):
        if any(pieces):
            yield Template(pieces)


def _pieces(node: ast.expr, names: Mapping[str, Any]) -> list[tuple[Piece, ...]]:
    """Returns the alternatives of an expression's value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        parts = re.split(r"%[sdr]", node.value)  # as in logging calls
        return [tuple(piece for part in parts for piece in (_HOLE, part))[1:]]
    if isinstance(node, ast.JoinedStr):
        return _joined([_pieces(value, names) for value in node.values])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _joined([_pieces(node.left, names), _pieces(node.right, names)])
    if isinstance(node, ast.IfExp):
        return [*_pieces(node.body, names), *_pieces(node.orelse, names)]
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
        value = names.get(node.value.id)
        if isinstance(value, str | int | float):
            return [(str(value),)]
    return [(_HOLE,)]


def _joined(parts: list[list[tuple[Piece, ...]]]) -> list[tuple[Piece, ...]]:
    return [tuple(itertools.chain(*choice)) for choice in itertools.product(*parts)]
