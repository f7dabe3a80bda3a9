"""Replies of policies that have collapsed or attack what reads them."""

from __future__ import annotations

TOKENS = 2048
UNITS = (
    *"a0U(){}[]<>`*_#$^!,.:;-+/|\\\"'\n\t \0",
    *("\ud800", "\u2192", "\u0661", "\u00bd", "\ufdfd", "\U0001d7ce", "e\u0301"),
    *("```\n", "```python\n", "``` \n`", "`a", "~~~\n", "> ", "| 1 ", "()", "[[", "]]", "{1}", "$$", "**"),
    *("1e", "9^", "0x", "1,", "1.", "-1", "+1", "1+", "U,", "U\n", "1. U\n"),
    *("[1, ", "{'a': ", "lambda: ", "not ", "f("),
    *("\\boxed{", "\\boxed{1}", "\\frac{1}{", "\\text{", "\\(", "\\[", "<answer>", "</answer>", "<think>", "</think>"),
    *("Moves:", "Moves: U\n", "Grid:\n", "Grid:\n1234\n", "Final answer:", "Final answer: 1\n", "Answer is "),
    *("Input:\n", "Output:\n", "Input:\n```\n1\n```\nOutput:\n```\n2\n```\n"),
)
"""What is repeated: `TOKENS` tokens of one kind are what a policy writes that has collapsed."""
LITERALS = (
    "...",
    "1, ...",
    "{1: {2}}",
    "{[]: 1}",
    "{1}",
    "b'a'",
    "1j",
    "-" * 1000 + "1",
    "[" * 500 + "]" * 500,
    "{'a':" * 200 + "1" + "}" * 200,
    "'" + "a" * 1900 + "'",
    "9" * 1900,
    "9" * 5000,
    "1e999",
    "float('nan')",
    "'\\ud800'",
    "'\\x00'",
    "(yield)",
    "(x := 1)",
    "a=1, a=2",
    "*[1]",
    "**{}",
    "f'{1}'",
    "__import__('os')",
    "\ud800",
)
_VALUES = ("9^{9^{9}}", "9" * 255, "1/0", "0/0", "1e9999", r"\frac{1}{0}", r"\sqrt{-1}", "{" * 100 + "}" * 100)


def replies(part: int = 1) -> tuple[str, ...]:
    """Returns the replies; those that repeat something have a `part`-th of their length."""
    tokens, nested, million = TOKENS // part, 500 // part, 1_000_000 // part
    return (
        *(unit * (tokens // len(unit) + 1) for unit in UNITS),
        *(unit * (million // len(unit)) for unit in ("a", "\n", "```\n", "\\boxed{", "[", "Moves: ", "| ")),
        *(rf"\boxed{{{value}}}" for value in _VALUES),
        *(
            "(" * nested + ")" * nested,
            "\\boxed{" * nested + "}" * nested,
            "**" * nested + "U" + "**" * nested,
            "{" * 2 * nested + "}" * 2 * nested,
        ),
        # What patterns with two repetitions in a row take quadratic time for.
        *("```" + "a" * tokens + "`", "`" * tokens + "a" * tokens + "`", " " * tokens + "```" + " " * tokens + "a"),
    )


REPLIES = replies()
