"""What instruct models put around an answer: thoughts, Markdown, labels, boxes, code fences. No environment here.

Everything is a search by regular expressions without nested repetition, or a pass over lines: linear time, and
nothing is raised for any text.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SHOWN = 1500
"""Characters of an earlier reply, from its end, that prompts show."""
_MOST_LABELS = 20
"""Labels of one text, its last ones, that are looked at."""
_CUT = "\0"
"""Stands for a line that was cut: no parser reads it."""
_BOXED = re.compile(r"\\(?:boxed|fbox)[ \t]*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_FENCE = re.compile(r"[ \t]*`{3,}[ \t]*([\w+#.-]*)[^`]*")
_STRICT_CODE = re.compile(r"([ \t]*)```(python)?[ \t]*\r?$")
_CODE = re.compile(r"([ \t]*)```+[ \t]*([\w+#.-]*)[^`]*$")
_PYTHON = ("python", "python3", "py")


@dataclass(frozen=True)
class Labelled:
    """What follows a label such as `Moves:`, for a parser to read."""

    named: bool
    """The label names what is asked for; others (`Answer:`, a box) say only that something is an answer."""
    lines: tuple[str, ...]
    """The rest of the label's line, and the lines below it."""


def after_thoughts(reply: str) -> str:
    """Returns what follows a reply's last `</think>`, all of it if there is none."""
    return reply.rpartition("</think>")[2]


def labels(names: str, others: str) -> re.Pattern[str]:
    """Returns the pattern of labels for `labelled`.

    A label starts its line, in any case, marked up or not, and ends in a colon; as a heading or in bold, alone in its
    line, it needs none. `> Moves:` is no label: so prompts quote what other agents wrote.

    Args:
        names: a pattern of what is asked for, as `moves`.
        others: a pattern of what may stand for it, as `final answer`; `is` takes the place of their colon, too.
    """
    return re.compile(
        rf"(?im)^(?P<mark>[ \t\-*•#_`\"'{{(]*)(?:(?P<named>{names})|(?:{others}))"
        r"(?P<end>[ \t*_`\"')]*(?:[:\uff1a]|\r?$)|[ \t]+is\b[ \t]*:?)"
    )


def labelled(text: str, pattern: re.Pattern[str], window: int, boxes: bool = True) -> Iterator[Labelled]:
    r"""Yields what follows the labels of a text, the last one first.

    Args:
        text: a reply.
        pattern: as `labels` makes it.
        window: characters that are looked at after a label.
        boxes: yields a line's `\boxed{...}` as well; if several boxes of one line differ, then as none.
    """
    found: list[tuple[int, bool, str | None]] = []
    for match in pattern.finditer(text):
        named, end = match["named"] is not None, match["end"].strip().casefold()
        if end.startswith("is"):
            if named:
                continue
        elif ":" not in end and "\uff1a" not in end and not ("#" in match["mark"] or "**" in match["mark"]):
            continue  # a word at the start of a line
        found.append((match.end(), named, None))
    found = found[-_MOST_LABELS:]
    if boxes and (box := last_box(text, window)) is not None:
        found.append((box[0], False, box[1]))
    for start, named, boxed in sorted(found, key=lambda item: item[0], reverse=True):
        if boxed is not None:
            yield Labelled(False, (boxed,))
            continue
        lines = text[start : start + window].split("\n")
        if start + window < len(text):
            lines[-1] = _CUT
        yield Labelled(named, tuple(line.rstrip("\r") for line in lines))


def last_box(text: str, longest: int) -> tuple[int, str] | None:
    r"""Returns where the last `\boxed{...}` of a text begins and what is in it; None if there is no box at all.

    It holds nothing ("") if it is open or longer than `longest`, or if another box of its line holds something else.
    """
    starts = [match.end() for match in _BOXED.finditer(text)][-_MOST_LABELS:]
    if not starts:
        return None
    line = text.rfind("\n", 0, starts[-1])
    ends = [(start, _closing_brace(text, start, longest)) for start in starts if start > line]
    boxes = {text[start:end].strip() for start, end in ends if end is not None and not _BOXED.search(text, start, end)}
    return starts[-1], boxes.pop() if len(boxes) == 1 and ends[-1][1] is not None else ""


def _closing_brace(text: str, start: int, longest: int) -> int | None:
    """Returns where the brace that was opened before `start` is closed, at most `longest` characters on, or None."""
    depth = 1
    for mark in _BRACE.finditer(text, start, start + longest + 1):
        depth += {"{": 1, "}": -1}.get(mark.group(), 0)
        if depth == 0:
            return mark.start()
    return None


def fence(line: str) -> str | None:
    """Returns the language of a line that opens a fenced block, "" for none and for one that closes; else None."""
    match = _FENCE.fullmatch(line)
    return None if match is None else match[1].casefold()


def block_below(lines: Sequence[str]) -> list[str] | None:
    """Returns the lines of the fenced block that starts in the first of `lines`, or None if it is not closed."""
    for number, line in enumerate(lines):
        if number and fence(line) == "":
            return list(lines[1:number])
    return None


def extract_python(reply: str, strict: bool = False) -> str | None:
    """Returns the body of the last closed ```python block of `reply`, or None if there is none.

    `py` and `python3` name the language as well, in any case. A block that names none is read where no block names
    Python and no other one names nothing. What is indented with its fence is taken back by as much. `strict` knows
    blocks that begin with a line "```python" alone.
    """
    blocks: dict[bool, list[str]] = {True: [], False: []}
    body: list[str] = []
    opened: re.Match[str] | None = None
    wanted = False
    for line in reply.split("\n"):
        match = _STRICT_CODE.match(line) if strict else _CODE.match(line)
        if match is None or (strict and opened is not None and match[2]):
            body.append(line)
        elif opened is not None and not match[2]:
            if wanted:
                text = "".join(f"{kept}\n" for kept in body)
                blocks[bool(opened[2])].append(text if strict else _dedented(text, opened[1]))
            opened = None
        elif match[2] or not strict:
            opened, body = match, []
            wanted = not match[2] or match[2].casefold() in _PYTHON
    if blocks[True]:
        return blocks[True][-1]
    return blocks[False][0] if len(blocks[False]) == 1 else None


def _dedented(text: str, indent: str) -> str:
    return re.sub(rf"(?m)^{indent}", "", text) if indent else text


def shortened(text: str) -> str:
    """Returns what prompts show of an earlier reply: its last `SHOWN` characters."""
    return text if len(text) <= SHOWN else f"[...]{text[-SHOWN:]}"


def quoted(text: str) -> str:
    """Returns `text` quoted for a prompt, `> ` before every line, which no parser reads as an answer."""
    return textwrap.indent(text, "> ", lambda line: True)
