"""Parsing of replies as instruct models write them, for every environment."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fakes.coding_problems import ADD, DOUBLE
from fakes.sudoku_players import RIGHT, SOLVED, full, rows
from growth import assert_linear
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_atgrpo.environments.code import replies as coding_replies
from verl_atgrpo.environments.code.programs import Call, Exchange, Problem
from verl_atgrpo.environments.common import moves
from verl_atgrpo.environments.common.replies import extract_python, without_echo
from verl_atgrpo.environments.math import answers as math_answers
from verl_atgrpo.environments.ports import reasoning_gym as reasoning_gym_data
from verl_atgrpo.environments.sudoku import replies as sudoku_replies
from verl_atgrpo.play.quoting import quoted

MOVES: dict[str, str | None] = {
    "**Moves:** R, D": "RD",
    "**Moves**: R, D": "RD",
    "I go right, then down.\n\n**Moves: R, D**": "RD",
    "### Moves\nR, D": "RD",
    "- Moves: R, D": "RD",
    "Moves: [R, D]": "RD",
    'Moves: ["R", "D"]': "RD",
    "Moves: ['R', 'D'].": "RD",
    "Moves: (R, D)": "RD",
    "Moves: `R, D`": "RD",
    "`Moves: R, D`": "RD",
    "```\nMoves: R, D\n```": "RD",
    "Moves:\n```\nR, D\n```": "RD",
    "Moves:\n```python\n['R', 'D']\n```\nThis leads to the goal.": "RD",
    "Moves: R -> D": "RD",
    "Moves: R \u2192 D": "RD",
    "Moves: \u2192 \u2193": "RD",
    "Moves: R-D": "RD",
    "moves: r, d": "RD",
    "MOVES: RD": "RD",
    "Moves: Right, Down": "RD",
    "Moves: right down": "RD",
    "Moves: 1. R 2. D": "RD",
    "Moves:\n1. R\n2. D\n\nEach of them is free.": "RD",
    "Moves:\n1. Move right\n2. Move down": "RD",
    "Moves:\n- Right\n- Down": "RD",
    "Moves:\n\nStep 1: Right\nStep 2: Down\n": "RD",
    "Moves:\nR\nD\n\nDone.": "RD",
    "Final moves: R, D": "RD",
    "**Final answer:** R, D": "RD",
    "The final answer is R, D.": "RD",
    r"The answer is $\boxed{R, D}$.": "RD",
    r"Moves: \boxed{\text{R, D}}": "RD",
    r"**Final Answer:** \boxed{R \rightarrow D}": "RD",
    '{"moves": ["R", "D"]}': "RD",
    '```json\n{\n  "moves": [\n    "R",\n    "D"\n  ]\n}\n```': "RD",
    "<think>\nMoves: U\n</think>\n\nMoves: R, D": "RD",
    "Moves: U\nThat hits a wall.\nMoves: R, D": "RD",
    "Moves: R or D": None,
    "Moves: R/D": None,
    "Moves: R | D": None,
    "Moves: R, D or D, R": None,
    "Moves: [R, D], [D, R]": None,
    "Moves: R, D Moves: D, R": None,
    r"\boxed{R, D} or \boxed{D, R}": None,
    "Moves:\nR, D\nor\nD, R": None,
    "Moves: R, D, ...": None,
    "Moves: R, D then U": None,
    "Moves: R 3 times": None,
    "Moves: 3R, 2D": None,
    "Moves: 1. R 3. D": None,
    "Moves: U (up), D (down), L (left), R (right)": None,
    "Moves are U (up), D (down), L (left), R (right).": None,
    "Moves: <letters>": None,
    "Moves: <R, D> or <D>": None,
    "Answer with one line 'Moves: R, D' giving at most 9 moves.": None,
    "> Moves: R, D": None,
    "Moves: R, D\nWait.\nMoves: I do not know": None,
    "moves = ['U', 'D', 'L', 'R']": None,
    "R, D": None,
    "Moves: ['R', 'D'": None,
    "Moves:\n```\nR, D": None,
    "Moves: RRD": "RRD",
    "Moves:R D": "RD",
    f"Moves: {', '.join('R' * 9)}": "R" * 9,
    f"Moves: {', '.join('R' * 10)}": None,
    f"Moves: {'R' * 10}": None,
    **dict.fromkeys(("", " \n", "Moves:", "Moves: ...", "Moves: \uff32", "Mov\u0435s: R", "Moves: R\u2028D")),
    **dict.fromkeys(("The Moves: R", "Moves: R\x00D", "\U0001f600\ud800", "[__import__('os').getcwd()]")),
}
COMPACT_MOVES: dict[str, str | None] = {
    "RRD": "RRD",
    "  RRD\n": "RRD",
    "R" * 9: "R" * 9,
    **dict.fromkeys(("rrd", "R R", "R,R", "RR.", "R" * 10, "R\nD", "\u0280R", "RX")),
    **dict.fromkeys(("Moves: R", "Moves: r, d", "**R**", "right", "['R']", "\\boxed{R}")),
}
PRINTED_MOVES: dict[str, str | None] = {
    "R\nD\nR\n": "RDR",
    "searching\nR\nD\nR": "RDR",
    "1. R\n2. D\n3. R": "RDR",
    "right\ndown\nright": "RDR",
    "['Right', 'Down', 'Right']": "RDR",
    "rdr": "RDR",
    "Moves: ['R', 'D', 'R']": "RDR",
    "Shortest path: R -> D -> R": "RDR",
    "['R' 'D' 'R']": "RDR",
    "L\n['R', 'D', 'R']": "RDR",
    "Path length: 3": None,
    "visited: R": None,
    "None": None,
    "[]": None,
    "R or D": None,
    "U\n" * 10: None,
    "RRD": "RRD",
    "R, R, D\n": "RRD",
    '["R"]': "R",
    "('R', 'D')": "RD",
    "searching\nLL\n ['R', 'D'] \n\n": "RD",
    **dict.fromkeys(("", "\n \n", "no way", "RRD\ndone", "R;D", "()", "['R'", "['X']", "[1, 2]", "[['R']]")),
    **dict.fromkeys(("{'R': 1}", "['R', None]", "(R, D), (D, R)", "[\x00]", "['\ud800']", "['\uff32']")),
    **dict.fromkeys(("[" * 5000, f"[{'-' * 9999}1]", f"[{'1+' * 9999}1]", "R" * 10, str(["R"] * 10))),
    **dict.fromkeys(("[{[]: 1}]", "[{{}}]", f"[{'9' * 400}+1j]")),
}
GRID = "1234341221434321"
ROWS = "1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1"
TABLE = "| 1 | 2 | 3 | 4 |\n|---|---|---|---|\n| 3 | 4 | 1 | 2 |\n| 2 | 1 | 4 | 3 |\n| 4 | 3 | 2 | 1 |"
BOXES = "+-----+-----+\n| 1 2 | 3 4 |\n| 3 4 | 1 2 |\n+-----+-----+\n| 2 1 | 4 3 |\n| 4 3 | 2 1 |\n+-----+-----+"
LISTS = "[[1, 2, 3, 4],\n [3, 4, 1, 2],\n [2, 1, 4, 3],\n [4, 3, 2, 1]]"
GRIDS: dict[str, str | None] = {
    f"**Grid:**\n{ROWS}": GRID,
    f"### Final Grid\n\n{ROWS}": GRID,
    f"grid:\n```\n{ROWS}\n```\nEvery row holds each digit.": GRID,
    f"Grid:\n\n{TABLE}": GRID,
    f"Grid:\n{BOXES}": GRID,
    "Grid:\n1 2 | 3 4\n3 4 | 1 2\n----+----\n2 1 | 4 3\n4 3 | 2 1": GRID,
    "Grid:\n12 34\n34 12\n\n21 43\n43 21": GRID,
    "Grid:\n1, 2, 3, 4\n3, 4, 1, 2\n2, 1, 4, 3\n4, 3, 2, 1": GRID,
    f"Grid:\n{LISTS}": GRID,
    f"Grid: {LISTS}".replace("\n", ""): GRID,
    "Grid:\nRow 1: 1 2 3 4\nRow 2: 3 4 1 2\nRow 3: 2 1 4 3\nRow 4: 4 3 2 1": GRID,
    f"Grid:\n{ROWS}".replace("3", "**3**"): GRID,
    f"**Final answer:**\n{ROWS}": GRID,
    f"Solution:\n{ROWS}\nIt is complete.": GRID,
    '{"grid": [[1,2,3,4],[3,4,1,2],[2,1,4,3],[4,3,2,1]]}': GRID,
    f"Grid:\n{ROWS}".replace("1", "_"): GRID.replace("1", "."),
    f"Grid:\n{ROWS}\n{ROWS[:7]}": None,
    f"Grid:\n{ROWS}\n\n{ROWS}": None,
    f"Grid:\n{ROWS[:-8]}": None,
    f"Grid:\n{ROWS} or 2 3 4 1": None,
    f"Grid:\n{ROWS}".replace("1 2 3 4", "12 3 4"): None,
    f"The grid now is\n{ROWS}": None,
    f"> Grid:\n> {ROWS}".replace("\n", "\n> "): None,
    f"Grid: {GRID}": None,
    f"Grid:\n{ROWS}\nI am not sure.\nGrid: none": None,
    ROWS: None,
    full(RIGHT): RIGHT,
    f"Grid:\n{rows(RIGHT)}": RIGHT,
    f"I thought.\nGrid: \r\n{rows(RIGHT, ' ')}\r\nThat is it.": RIGHT,
    f"{full(SOLVED)}\nno, better:\n{full(RIGHT)}": RIGHT,
    full(RIGHT.replace(".", "0")): RIGHT,
    **dict.fromkeys(
        ("", " \n", "Grid:", "Grid:\n", "Grid: ...", "Grid:\n....", "12", "\n" * 9, "\x00", "\U0001f600\ud800")
    ),
    **dict.fromkeys(full(RIGHT).replace("1", other) for other in ("\uff11", "\u0661", "5", "x", "-1")),
    full(RIGHT).replace("Grid", "grid").replace(":", ""): None,
    f"The {full(RIGHT)}": None,
    f"{full(RIGHT)}\n1 2 3 4": None,
    full(RIGHT).replace("\n", "\u2028"): None,
    full(RIGHT)[:-4]: None,
    f"{full(SOLVED)}\nGrid:\n1 2": None,
    f"Grid:\n{SOLVED}": None,
    "[__import__('os').getcwd()]": None,
}
COMPACT_GRIDS: dict[str, str | None] = {
    rows(RIGHT): RIGHT,
    f"\n{rows(RIGHT, ' ')}\n": RIGHT,
    **dict.fromkeys((f"so\n{rows(RIGHT)}", f"{rows(RIGHT)}\n....", f"{rows(RIGHT)}>", full(RIGHT))),
}
PRINTED_GRIDS: dict[str, str | None] = {
    LISTS: GRID,
    LISTS.replace("\n", ""): GRID,
    LISTS.replace(",", ""): GRID,
    BOXES: GRID,
    f"1 2 . .\n. . . .\n1 . . .\n. . . .\n\nSolved:\n{ROWS}\n": GRID,
    f"{ROWS}\nTrue": None,
    "No solution": None,
    rows(RIGHT): RIGHT,
    f"searching\n\n{rows(RIGHT, ' ')}\n\n": RIGHT,
    rows(RIGHT, ", ").replace(".", "0"): RIGHT,
    rows(RIGHT, "\t"): RIGHT,
    **dict.fromkeys((f"{rows(RIGHT)}\ndone", rows(RIGHT)[:-5], rows(RIGHT, ";"), "", "Grid:\n....", "\n" * 9, "\x00")),
}
MATH: dict[str, str | None] = {
    r"So it is $$\boxed{42}$$": "42",
    r"**\boxed{42}**": "42",
    r"\boxed {42}": "42",
    r"\fbox{42}": "42",
    r"\boxed{**42**}": "42",
    r"\boxed{42}, that is \boxed{42}": "42",
    "\\boxed{41} is wrong.\n\\boxed{42}": "42",
    r"<think>\boxed{41}</think>\boxed{42}": "42",
    "**Final Answer:** 42": "42",
    "### Final Answer\n\n$42$": "42",
    "The final answer is 42.": "42",
    r"Therefore, the answer is \(42\).": "42",
    "Answer: **42**": "42",
    r"\boxed{41} or \boxed{42}": None,
    r"\boxed{41} \boxed{": None,
    r"End with the final answer in \boxed{}, and nothing but the answer in it.": None,
    "Final answer: 41 or 42": None,
    "Final answer: 41. No, 42": None,
    "Final answer: the number of cats": None,
    "42": None,
}
PRINTED_MATH: dict[str, str | None] = {
    "Answer: 42": "42",
    "The answer is: 42": "42",
    r"\boxed{42}": "42",
    "[1, 42]": "1, 42",
    "2*pi": r"2 \cdot \pi",
    "": None,
}
PROGRAMS: dict[str, str | None] = {
    "```py\nprint(1)\n```": "print(1)\n",
    "```Python\nprint(1)\n```": "print(1)\n",
    "``` python3\nprint(1)\n```": "print(1)\n",
    '```python title="a.py"\nprint(1)\n```': "print(1)\n",
    "Here:\n```\nprint(1)\n```": "print(1)\n",
    "```python\nprint(1)\n```\nIt prints\n```\n1\n```": "print(1)\n",
    "```\n3\n```\nso\n```py\nprint(1)\n```": "print(1)\n",
    "1. Run\n   ```python\n   if 1:\n       print(1)\n   ```": "if 1:\n    print(1)\n",
    "```python\nprint(0)\n```\nBetter:\n```python\nprint(1)\n```": "print(1)\n",
    "```\nprint(0)\n```\nor\n```\nprint(1)\n```": None,
    "```cpp\nint main() {}\n```": None,
    "```json\n[1]\n```": None,
    "```python\nprint(1)": None,
    "Write one ```python block.": None,
    "> ```python\n> print(1)\n> ```": None,
}
BOTH = Exchange("3\n", "6\n")
TESTS: dict[str, object] = {
    "**Input:**\n```\n3\n```\n**Output:**\n```\n6\n```\nSince 2 * 3 = 6.": BOTH,
    "### Input\n```text\n3\n```\n\n### Expected Output\n```text\n6\n```": BOTH,
    "1. Input:\n   ```\n3\n   ```\n2. Output:\n   ```\n6\n   ```": BOTH,
    "Test input:\n3\nExpected result:\n6": BOTH,
    "Input: 3\nOutput: 6": BOTH,
    "input: `3`\noutput: `6`": BOTH,
    "**Input**: 3\n**Output**: 6": BOTH,
    "Input:\n3\n\nOutput:\n6\n": BOTH,
    "Input:\n```\n3\n```\nOutput: 6": BOTH,
    "Input:\n```\n1\n```\nOutput:\n```\n2\n```\nor\nInput:\n```\n3\n```\nOutput:\n```\n6\n```": BOTH,
    "Input: 3\nOutput: 6\n\nBecause it is doubled.": None,
    "Input: 3\nSome words\n\nOutput: 6": None,
    "Input:\n```\n3\n```\n```\n4\n```\nOutput:\n```\n6\n```": None,
    "Output: 6\nInput: 3": None,
    "Give a line 'Input:', below it a ``` block, then a line 'Output:', below it a ``` block.": None,
    "> Input: 3\n> Output: 6": None,
}
CALLS: dict[str, object] = {
    "Input: 1, 2\nOutput: 3": Call((1, 2), 3),
    "Input: add(1, 2)\nOutput: 3": Call((1, 2), 3),
    "Input: b = 2, a = 1\nOutput: 3": Call((1, 2), 3),
    "**Input:** `a = 1, b = 2`\n**Output:** `3`": Call((1, 2), 3),
    "Input: a = 1, c = 2\nOutput: 3": None,
    "Input: add(1, 2) + add(3, 4)\nOutput: 10": None,
    "Input: 1, x\nOutput: 3": None,
    "Input: 1, 2\nOutput: 3 or 4": None,
    "Input: [1, ...], 2\nOutput: 3": None,
}
ANSWERS: dict[str, str | None] = {
    "<answer>zebra</answer>": "zebra",
    "**<Answer>zebra</Answer>**": "zebra",
    "<answer>**zebra**</answer>.": "zebra",
    "<answer>\n```\nzebra\n```\n</answer>": "zebra",
    r"<answer>\boxed{zebra}</answer>": "zebra",
    "<answer>lion</answer> no, <answer>zebra</answer>": "zebra",
    "**Final answer:** zebra": "zebra",
    "Final Answer\nzebra": None,
    "### Final Answer\n\nzebra": "zebra",
    r"It is \boxed{zebra}": "zebra",
    "<answer>zebra": None,
    "<answer>zebra</answer> or <answer>": None,
    "<answer>zebra</answer> is what I think": None,
    "Write the final answer, and nothing but it, into one <answer> element at the very end.": None,
    "zebra": None,
}
READERS: dict[str, tuple[Callable[[str], object], dict[str, object]]] = {
    "moves": (lambda text: moves.parse_moves(text, "full", 9), {**MOVES}),
    "compact moves": (lambda text: moves.parse_moves(text, "compact", 9), {**COMPACT_MOVES}),
    "printed moves": (lambda text: moves.parse_printed(text, 9), {**PRINTED_MOVES}),
    "grids": (lambda text: sudoku_replies.parse_grid(text, "full", 4), {**GRIDS}),
    "compact grids": (lambda text: sudoku_replies.parse_grid(text, "compact", 4), {**COMPACT_GRIDS}),
    "printed grids": (lambda text: sudoku_replies.parse_printed(text, 4), {**PRINTED_GRIDS}),
    "math": (math_answers.parse_answer, {**MATH}),
    "printed math": (math_answers.parse_printed, {**PRINTED_MATH}),
    "programs": (extract_python, {**PROGRAMS}),
    "tests": (lambda text: coding_replies.parse_test(text, DOUBLE), TESTS),
    "calls": (lambda text: coding_replies.parse_test(text, ADD), CALLS),
    "answers": (lambda text: reasoning_gym_data.parse_answer(text, "full"), {**ANSWERS}),
}
CASES = [(name, reply, wanted) for name, (_, table) in READERS.items() for reply, wanted in table.items()]


@pytest.mark.parametrize(("name", "reply", "wanted"), CASES)
def test_usual_forms_parse_and_ambiguous_ones_do_not(name: str, reply: str, wanted: object) -> None:
    assert READERS[name][0](reply) == wanted


@pytest.mark.parametrize(
    ("name", "reply"),
    [(name, reply) for name, reply, _ in CASES if name == "moves" or (name == "grids" and reply != ROWS)],
)
def test_compact_replies_have_no_markup(name: str, reply: str) -> None:
    """The formats of tiny models must not change, because measurements depend on them."""
    if name == "moves":
        assert moves.parse_moves(reply, "compact", 9) is None
    else:
        assert sudoku_replies.parse_grid(reply, "compact", 4) is None


PROMPT = "Type your action as: [up], [down], [left], [right] or [w],\nand end with it. The board has 16 fields."


@pytest.mark.parametrize(
    ("reply", "left"),
    [
        (PROMPT, ""),
        (PROMPT.upper(), ""),
        (PROMPT.replace(" ", "\n\n"), ""),
        (PROMPT.replace("\n", " ") + " [up]", " [up]"),
        (f"I read: {PROMPT}\nSo: [left]", "I read: \nSo: [left]"),
        (PROMPT[5:70], " wit"),
        (f"{PROMPT} or {PROMPT}", " or "),
        # What is short is a move, not an echo, and so is what has other words between.
        ("[up], [down]", "[up], [down]"),
        ("Type your action as: [up], [down], [left]", "Type your action as: [up], [down], [left]"),
        ("Type my action as: [up], [down], my [left], [right]", "Type my action as: [up], [down], my [left], [right]"),
        ("", ""),
    ],
)
def test_what_a_reply_repeats_of_its_prompt_is_left_out(reply: str, left: str) -> None:
    assert without_echo(reply, PROMPT) == left
    assert without_echo(reply, "") == reply


def test_a_quotation_is_not_much_longer_than_what_it_quotes() -> None:
    """Or an agent that repeats line breaks fills the next agent's prompt."""
    assert quoted("a\n\nb\n  c\n") == "> a\n> \n> b\n>   c"
    assert quoted("a" + "\n \n\t\r\n\u2028" * 500 + "b" + "\n" * 1000) == "> a\n> \n> b"


@pytest.mark.parametrize("change", [str, str.swapcase])
@pytest.mark.parametrize("example", ["Input: 3\nOutput: 6", "Input:\n```\n3\n```\nOutput:\n```\n6\n```"])
def test_an_example_of_the_statement_is_no_test(example: str, change: Callable[[str], str]) -> None:
    """Every solution would pass a copied example."""
    problem = Problem(f"Double it.\n\n{example}", DOUBLE.tests)
    assert coding_replies.parse_test(change(problem.statement), problem) is None
    assert coding_replies.parse_test(change(example), problem) is None
    assert coding_replies.parse_test(example.replace("3", "4"), problem) is not None


@pytest.mark.parametrize("label", ["{}", "{}:", "**Sample {} 1**", "### {}"])
def test_an_example_in_another_layout_is_none_either(label: str) -> None:
    given, expected = label.format("Input"), label.format("Output")
    problem = Problem(f"Double it.\n\n{given}\n3 4\n\n{expected}\n6 8\n\nNote\nSo it is.", DOUBLE.tests)
    for test in (
        "Input:\n```\n{}\n```\nOutput:\n```\n{}\n```",
        "**Input**\n{}\n**Output**\n{}",
        "Input: {}\nOutput: {}",
    ):
        assert coding_replies.parse_test(test.format("3 4", "6 8"), problem) is None
        assert coding_replies.parse_test(test.format("4 3", "8 6"), problem) is not None


pieces = st.sampled_from(
    [
        *"UDLR.,:;-*#`'\"[](){}|>\\$_=\n\t 0123456789",
        *("Moves:", "Grid:", "Input:", "Output:", "Final answer", "```", "```python", "\\boxed{", "<answer>", "1. "),
        *("</answer>", "</think>", "\u2192", "\u00df", "\ud800", "\0", "right", "or", "1 2 3 4\n", "- "),
    ]
)


@settings(deadline=None, max_examples=300)
@given(st.lists(pieces, max_size=40).map("".join))
def test_no_reply_raises(reply: str) -> None:
    for read, _ in READERS.values():
        assert read(reply) == read(reply)


LONG = 40_000
HUGE = [
    *("Moves:", "Moves:\n", "Moves: R\n", "Answer:\n1. R\n", "Answer:\n- R\n", "Answer: [\n", "Answer:\n```\nR\n"),
    *("Grid:\n", "Answer:\n1 2 3 4\n", "Answer:\n----\n", "Answer: [[\n", "|-|\n", "], ["),
    *("\\boxed{", "\\boxed{1}", "\\boxed{1}\n", "{", "}"),
    *("Answer: ", "Answer:\n", "Answer is ", "**Answer**\n", "***"),
    *("```python\n", "```\n", "```\n\n", "Input:\n", "Output:\n", "Input: 1\nOutput: 1\n", "Input:\n```\n"),
    *("<answer>", "</answer>", "<answer>1</answer>\n", "<think>", "</think>", "R, ", "R\n", "1. R\n", "- - ", "# # "),
    *("final " * 3, "the ", "expected ", "(((", "`", "\n", " ", "\t\n", "x", "\u00df"),
]


def _repeated(size: int) -> tuple[str, ...]:
    return tuple(text * (size // len(text)) for text in HUGE)


MEGABYTE = 10**6


def _long(size: int) -> tuple[str, ...]:
    """Returns texts of about `size` characters."""
    return (
        *(text * (size // len(text)) for text in ("R", "1", "Moves: ", "Grid:\n", "\n", "[", "\u00e9\U0001f600")),
        *("Moves: " + "R, " * (size // 3) + end for end in ("", "x")),
        *(f"Moves: R{gap * (size // len(gap))}x" for gap in (" ", ", ", " .")),
        *(f"{mark}{' ' * size}x" for mark in ("Moves:", "Grid:")),
        "Moves: R\n" * (size // 9) + "Moves: x",
        "Grid:\n" + "1 2 3 4\n" * (size // 8),
        "Grid:\n1" + " " * size + "234",
        " \n" * (size // 2) + "x",
    )


_LONG = {
    f"{text[:12]!r}, {number} of {size}": (make, number, size)
    for make, size in ((_repeated, LONG), (_long, MEGABYTE))
    for number, text in enumerate(make(100))
}
"""Name -> function of a size, the number of one of its replies, and the size."""


@pytest.mark.parametrize("case", _LONG)
def test_long_replies_are_read_in_linear_time(case: str) -> None:
    """Earlier, 40,000 characters of fences took 1.3 s, in quadratic time."""
    make, number, size = _LONG[case]
    replies = {length: make(length)[number] for length in (size // 2, size)}
    for name, (read, _) in READERS.items():
        assert_linear(lambda length, read=read: read(replies[length]), size // 2, name)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("no code", None),
        ("```python\nx = 1\n", None),
        ("a\n```python\nx = 1\n```\nb\n```python\ny = '```'\n```\nend", "y = '```'\n"),
        ("```python\r\nx\r\n```\r\n", "x\r\n"),
        ("```python\n```", ""),
    ],
)
def test_extract_python(reply: str, code: str | None) -> None:
    assert extract_python(reply) == code


@pytest.mark.parametrize("line", ["```python\n", "```\n", "```python\nx\n", "`", "```python\n\n", "~~~\n"])
def test_code_blocks_are_read_in_linear_time(line: str) -> None:
    """Earlier, 40,000 characters took 1.3 s and a megabyte more than ten minutes."""
    texts = {size: line * (size // len(line)) for size in (500_000, 1_000_000)}
    assert_linear(lambda size: extract_python(texts[size]), 500_000)
