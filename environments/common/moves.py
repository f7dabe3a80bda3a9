"""Games whose answers are moves up, down, left and right: parsing answers and wording prompts."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from annotated_types import Ge, Le

from verl_atgrpo.environments.common.drafting import DraftingGame, State
from verl_atgrpo.environments.common.replies import after_thoughts, block_below, fence, labelled, labels
from verl_atgrpo.environments.common.workflow import Style

Tool = Literal["python", "moves"]
Moves = Annotated[int, Ge(1), Le(10_000)]
"""Most moves in one answer."""

Cell = tuple[int, int]
"""(row, column), from the top left."""
MOVES: dict[str, Cell] = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
"""Move -> what it adds to row and column."""

_LETTERS = {**{name: name for name in MOVES}, "UP": "U", "DOWN": "D", "LEFT": "L", "RIGHT": "R"}
_SIGNS = {"\u2191": "U", "\u2193": "D", "\u2190": "L", "\u2192": "R"}
_BETWEEN = re.compile(r"[ \t]*(?:,|-+>|=+>|[>\u2013\u2014\u2192\u21d2\u27a1\u279c-])[ \t]*|[ \t]+")
_LATEX_ARROW = re.compile(r"\\(?:long)?(?:rightarrow|Rightarrow|to)(?![a-zA-Z])")
_NUMBER = re.compile(r"([0-9]{1,3})[.):]")
_IN_LATEX = re.compile(r"\\(?:boxed|fbox|text|texttt|mathrm|mathbf|textbf)[ \t]*\{(.*)\}|\\\((.*)\\\)|\\\[(.*)\\\]")
_IN_BRACKETS = re.compile(r"\[(.*)\]|\((.*)\)|\{(.*)\}|<(.*)>")
_AROUND = " \t\r*_`$\"'"
_ITEM = re.compile(r"[ \t]*(?:[-*+\u2022]|(?=(?:step[ \t]*)?[0-9]{1,3}[.):]))[ \t]*", re.IGNORECASE)
"""The mark of a list item, without its number."""
_BEFORE_MOVES = ("move", "go", "step")
_LABELS = labels(
    r"(?:(?:final|my|best|next|planned|full) )*moves(?: list| sequence)?",
    r"(?:the )?(?:(?:final|correct|shortest|optimal|best) )*(?:answer|solution|path|plan|actions?)",
)
_PRINTED_LABEL = re.compile(
    r"[a-z ]{0,30}(?:moves?|path|answer|solution|plan|actions?|sequence)[a-z ]{0,20}[:=]", re.I
)


def moved(cell: Cell, move: str) -> Cell:
    """Returns the cell that a move leads to, whether it can be entered or not."""
    row, column = MOVES[move]
    return cell[0] + row, cell[1] + column


def parse_moves(reply: str, style: Style, limit: int) -> str | None:
    """Returns the moves that `reply` gives in the agreed format, or None.

    `compact`: only letters. `full`: the list after the last label `Moves:`, in the forms that instruct models use:
    marked up, bracketed, quoted, fenced, numbered, one move per line, with arrows, in words; without that label, after
    `Final answer:` or in a box. Any text besides the moves ("R or D", "R, D then U") and a list of more than `limit`
    moves do not parse. Neither does the description of the format in the prompts, so echoing it earns nothing.
    """
    if style == "compact":
        moves = reply.strip()
        return moves if 0 < len(moves) <= limit and not set(moves) - set(MOVES) else None
    for label in labelled(after_thoughts(reply), _LABELS, _longest(limit)):
        found = _read_labelled(label.lines, limit)
        if found is not None or label.named:
            return found
    return None


def read_moves(text: str, limit: int) -> str | None:
    """Returns the moves of a text that is a list of 1 to `limit` moves and nothing else, or None.

    Moves are letters or words in any case, or arrows, separated by commas, arrows, hyphens or blanks; letters also
    without separator. The list may be in brackets, each move may be quoted and numbered from 1.
    """
    if len(text) > _longest(limit) or ".." in text:
        return None
    text = _LATEX_ARROW.sub(">", text).strip(_AROUND).rstrip(".").strip(_AROUND)
    bracketed = False
    while (match := _IN_LATEX.fullmatch(text) or (None if bracketed else _IN_BRACKETS.fullmatch(text))) is not None:
        bracketed = bracketed or match.re is _IN_BRACKETS
        text = (match[match.lastindex or 0] or "").strip(_AROUND)
    if text and not text.strip("".join(_SIGNS) + " \t,"):
        moves = "".join(_SIGNS.get(sign, "") for sign in text)
        return moves if 0 < len(moves) <= limit else None
    moves, numbered = "", False
    for part in _BETWEEN.split(text):
        token = part.strip("*_`\"'")
        if (number := _NUMBER.match(token)) is not None:
            if numbered or int(number[1]) != len(moves) + 1:
                return None
            numbered, token = True, token[number.end() :].strip("*_`\"'")
            if not token:
                continue
        elif token.casefold() in _BEFORE_MOVES and part.isascii():
            continue
        if not token.isascii() or not (read := _letters(token)):
            return None
        moves, numbered = moves + read, False
        if len(moves) > limit:
            return None
    return moves or None


def _letters(token: str) -> str | None:
    upper = token.upper()
    if upper in _LETTERS:
        return _LETTERS[upper]
    return upper if token in (upper, token.lower()) and not set(upper) - set(MOVES) else None


def _longest(limit: int) -> int:
    """Returns the most characters of a list of `limit` moves: "10. Move right," with its line end has 17."""
    return 24 * limit + 100


def _read_labelled(lines: Sequence[str], limit: int) -> str | None:
    """Returns the moves after a label, in its line or in the block or list below it, or None."""
    first, *below = lines
    if "{" not in first:
        first = first.rstrip(" }")  # of a JSON object
    if first.strip(_AROUND):
        opened = first.strip(_AROUND)
        if opened[0] in "[(" and not set("])") & set(opened):  # a list that Python or JSON would spread over lines
            for number, line in enumerate(below, 1):
                if set("])") & set(line):
                    return read_moves(" ".join(line.strip() for line in lines[: number + 1]), limit)
            return None
        return read_moves(first, limit)
    while below and not below[0].strip(" \t*_"):
        del below[0]
    if not below:
        return None
    if fence(below[0]) is not None:
        block = block_below(below)
        return None if block is None else _read_items([line for line in block if line.strip()], limit)
    listed = _ITEM.match(below[0]) is not None
    items = []
    for line in below:
        if not line.strip():
            if not listed:
                break
        elif listed and _ITEM.match(line) is None:
            break
        else:
            items.append(line)
    return _read_items(items, limit)


def _read_items(lines: Sequence[str], limit: int) -> str | None:
    items = [_ITEM.sub("", line, count=1).strip().rstrip(",") for line in lines]
    return read_moves(", ".join(items), limit) if len(items) > 1 else read_moves("".join(items), limit)


def parse_printed(output: str, limit: int) -> str | None:
    """Returns the moves at the end of a program's output, as `read_moves` parses them, or None.

    They are the last non-empty line, with or without a label; if that is a single move, the preceding lines that are
    single moves belong to it.
    """
    lines = [line for line in output.split("\n") if line.strip()]
    if not lines:
        return None
    last = lines[-1].strip()
    if len(last) > _longest(limit):
        return None
    label = _PRINTED_LABEL.match(last)
    moves = read_moves(last[label.end() :] if label else last, limit)
    if label or not _single(last):
        return moves
    start = len(lines) - 1
    while start and len(lines) - start <= limit and _single(lines[start - 1].strip()):
        start -= 1
    return _read_items(lines[start:], limit)


def _single(line: str) -> bool:
    item = _ITEM.sub("", line, count=1)
    return len(item) < 32 and "[" not in item and len(read_moves(_NUMBER.sub("", item, count=1), 2) or "") == 1


class MoveGame(DraftingGame[State, str]):
    """A drafting game whose answers are moves."""

    max_moves: int
    """Most moves in one answer."""
    search: str
    """How to find an answer."""
    check: str
    """How to find one after a draft."""

    @abstractmethod
    def lead(self, state: State, moves: str) -> str:
        """Returns where moves lead, as prompts of this style show it."""

    def parse(self, reply: str) -> str | None:
        return parse_moves(reply, self.style, self.max_moves)

    def parse_printed(self, output: str) -> str | None:
        return parse_printed(output, self.max_moves)

    def effect(self, state: State, draft: str | None) -> str:
        """Returns the drafted moves and where they lead."""
        lead = None if draft is None else self.lead(state, draft)
        if self.style == "compact":
            return f"{draft or ''}>{lead or 'none'}"
        if draft is None:
            return "A tool user drafted no valid moves."
        return f"A tool user drafted: {', '.join(draft)}. {lead}"

    def ask(self, draft: str | None = None) -> str:
        """Returns the instruction to answer, which itself does not parse as an answer.

        With no `search` and `check` it asks for the answer at once.
        """
        think = self.search if draft is None else self.check
        how = f"Think step by step: {think} Then end" if think else "Answer"
        return (
            f"{how} with one line 'Moves: ...' giving at most {self.max_moves} moves, for example 'Moves: <letters>'."
        )


def ask_program(moves: str, method: str) -> str:
    """Returns the instruction to write a program: which moves it must print, and the method to find them."""
    return (
        "Write one ```python block. The program knows nothing but what you write into it; it must find the moves by "
        f"{method}, not have them written down, and must print the list of moves {moves} as its last line, for "
        "example print(moves) with moves a list of letters."
    )


def listed_cells(cells: Iterable[tuple[int, int]]) -> str:
    """Returns cells in the form of prompts: (row, column), ..."""
    return ", ".join(map(str, sorted(cells))) or "none"
