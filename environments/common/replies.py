"""Parsing of what instruct models write around an answer: thoughts, Markdown, labels, boxes, code fences.

Independent of environments. All functions take linear time (regular expressions without nested repetition, or one
pass over lines) and raise for no text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from verl_atgrpo.play.quoting import READ
from verl_atgrpo.play.thoughts import split_thought

ECHO = 8
"""Words of a prompt in a row that a reply repeats: no move and no answer is that long."""
_PART = 3
"""Words of a question in a row that are a part of it."""
_WORD = re.compile(r"\S+")
_MOST_LABELS = 20
"""Labels of one text, the last ones, that are considered."""
_CUT = "\0"
"""Replaces a line that was cut: no parser accepts it."""
_BOXED = re.compile(r"\\(?:boxed|fbox)[ \t]*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# What follows a language is not in the patterns: two repetitions in a row would take quadratic time.
_FENCE = re.compile(r"[ \t]*`{3,}[ \t]*([\w+#.-]*)")
_CODE = re.compile(r"(?m)^([ \t]*)```+[ \t]*([\w+#.-]*)(.*)")
_PYTHON = ("python", "python3", "py")


@dataclass(frozen=True)
class Labelled:
    """The text after a label such as `Moves:`."""

    named: bool
    """Whether the label names the requested item; others (`Answer:`, a box) only mark an answer."""
    lines: tuple[str, ...]
    """The rest of the label's line and the lines below it."""


def after_thoughts(reply: str) -> str:
    """Returns what a reply says (`play.thoughts`), of its end `READ`."""
    return split_thought(reply)[1][-READ:]


def last_line(text: str) -> str:
    """Returns the last line that is not blank and not the end of a code fence, without spaces around."""
    lines = (line.strip() for line in reversed(text.split("\n")))
    return next((line for line in lines if line.strip("`")), "")


def without_echo(reply: str, prompt: str) -> str:
    """Returns a reply without the runs of `ECHO` and more words that its prompt has, in any case and layout."""
    told = prompt.casefold().split()
    runs = {tuple(told[at : at + ECHO]) for at in range(len(told) - ECHO + 1)}
    words = list(_WORD.finditer(reply))
    said = [word[0].casefold() for word in words]
    kept, start, repeated = [], 0, -1
    for number, word in enumerate(words):
        if tuple(said[number : number + ECHO]) in runs:
            if number > repeated:
                kept.append(reply[start : word.start()])
            repeated = number + ECHO - 1
            start = words[repeated].end()
    return "".join([*kept, reply[start:]])


def repeats(answer: str, question: str) -> bool:
    """Returns whether an answer has half of a question, in any case and layout; of a short one, all but a word.

    Half of the words in a row have the second or the third quarter of them.
    """
    words, said = question.casefold().split(), f" {' '.join(answer.casefold().split())} "
    count = len(words)
    quarters = words[count // 4 : count // 2], words[count // 2 : 3 * count // 4]
    parts = quarters if count >= 4 * _PART else (words[1:], words[:-1]) if count > _PART else (words,)
    return any(f" {' '.join(part)} " in said for part in parts)


def labels(names: str, others: str) -> re.Pattern[str]:
    """Returns the pattern of labels for `labelled`.

    A label starts its line, in any case, marked up or not, and ends in a colon; as a heading or in bold, alone in its
    line, it needs no colon. `> Moves:` is not a label, because prompts quote other agents' replies like this.

    Args:
        names: pattern of the requested item, such as `moves`.
        others: pattern of general labels, such as `final answer`, which may end in `is` instead of a colon.
    """
    return re.compile(
        rf"(?im)^(?P<mark>[ \t\-*•#_`\"'{{(]*)(?:(?P<named>{names})|(?:{others}))"
        r"(?P<end>[ \t*_`\"')]*(?:[:\uff1a]|\r?$)|[ \t]+is\b[ \t]*:?)"
    )


def labelled(text: str, pattern: re.Pattern[str], window: int, boxes: bool = True) -> Iterator[Labelled]:
    r"""Yields the text after each label of a text, the last label first.

    Args:
        text: a reply.
        pattern: as `labels` makes it.
        window: characters to read after a label.
        boxes: yields a line's `\boxed{...}` as well; an empty one if several boxes of the line differ.
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
    r"""Returns position and content of the last `\boxed{...}` of a text, or None if it has no box.

    The content is "" if the box is not closed or longer than `longest`, or if another box of its line differs.
    """
    starts = [match.end() for match in _BOXED.finditer(text)][-_MOST_LABELS:]
    if not starts:
        return None
    line = text.rfind("\n", 0, starts[-1])
    ends = [(start, closing_brace(text, start, longest)) for start in starts if start > line]
    boxes = {text[start:end].strip() for start, end in ends if end is not None and not _BOXED.search(text, start, end)}
    return starts[-1], boxes.pop() if len(boxes) == 1 and ends[-1][1] is not None else ""


def closing_brace(text: str, start: int, longest: int) -> int | None:
    """Returns the position of the brace that closes the one before `start`, within `longest` characters, or None."""
    depth = 1
    for mark in _BRACE.finditer(text, start, start + longest + 1):
        depth += {"{": 1, "}": -1}.get(mark.group(), 0)
        if depth == 0:
            return mark.start()
    return None


def closing_parenthesis(text: str, start: int, longest: int) -> int | None:
    """Returns the position of the parenthesis that closes the one before `start`, as `closing_brace`."""
    depth = 1
    for position, character in enumerate(text[start : start + longest], start):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return position
    return None


def fence(line: str) -> str | None:
    """Returns the language of a line that opens a fenced block, "" without language or if it closes one; else None."""
    match = _FENCE.match(line)
    return None if match is None or "`" in line[match.end() :] else match[1].casefold()


def block_below(lines: Sequence[str]) -> list[str] | None:
    """Returns the lines of the fenced block that starts at the first of `lines`, or None if it is not closed."""
    for number, line in enumerate(lines):
        if number and fence(line) == "":
            return list(lines[1:number])
    return None


def extract_python(reply: str) -> str | None:
    """Returns the body of the last closed ```python block of `reply`, or None if there is none.

    `py` and `python3` count as Python, in any case. If no block names Python, the only block without a language is
    used. Code that is indented with its fence is dedented.
    """
    text = after_thoughts(reply)
    named: tuple[str, str] | None = None
    unnamed: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for match in _CODE.finditer(text):
        if "`" in match[3]:
            continue
        if opened is not None and not match[2]:
            found = text[opened.end() + 1 : match.start()], opened[1]
            if not opened[2]:
                unnamed.append(found)
            elif opened[2].casefold() in _PYTHON:
                named = found
            opened = None
        else:
            opened = match
    if named is None and len(unnamed) == 1:
        named = unnamed[0]
    if named is None:
        return None
    block, indent = named
    return re.sub(rf"(?m)^{indent}", "", block) if indent else block
