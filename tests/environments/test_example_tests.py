"""A tester is not paid for an example of the statement in another notation, and is for a test of its own."""

from __future__ import annotations

import pytest
from fakes.coding_problems import test_block

from verl_atgrpo.environments.code.programs import Call, Exchange, Problem
from verl_atgrpo.environments.code.replies import parse_test

TESTS = (Exchange("3\n", "6\n"),)
LABELLED = "Double it.\n\nInput: 3\nOutput: 6"
SAMPLES = "Add them.\n\nExamples\n\nInput\n\n3\n1 2.5 30\n\nOutput\n\n33.5\n\nInput\n\n1\n7\n\nOutput\n\n7\n\nNote"
ATCODER = "Sum.\n\nSample Input 1:\n\n4\n10 20 30 40\n\nSample Output 1:\n\n100\n\nThe sum of 10 to 40 is 100."
APPS = "Double it.\n\n-----Sample Input-----\n7\n\n-----Sample Output-----\n14\n\nLong."
CODECHEF = "Double it.\n\n-----Sample Input:-----\n7\n\n-----Sample Output:-----\n14\n\n-----Note:-----\nNone"
CASES = "Add both.\n\nInput\n\n3\n1 2\n3 4\n5 6\n\nOutput\n\n3\n7\n11"
PROSE = "Sum. For instance, the sum of 4 10 20 30 40 is 100 and nothing else."


@pytest.mark.parametrize(
    ("statement", "given", "expected", "known"),
    [
        (LABELLED, "3", "6", True),
        (LABELLED, "03", "6", True),
        (LABELLED, "+3", "6", True),
        (LABELLED, "3.0", "6.0", True),
        (LABELLED, "3\n\n\n", "6", True),
        (LABELLED, "\n 3", "6", True),
        (LABELLED, "3\nnothing more", "6", True),
        (LABELLED, "3\n4", "06", True),
        (LABELLED, "3", "7", True),  # its result is known, and this is another
        (LABELLED, "3e0", "6", True),
        (LABELLED, "4", "8", False),
        (LABELLED, "33", "66", False),
        (LABELLED, "-3", "-6", False),
        (LABELLED, "3.5", "7", False),
        (SAMPLES, "3 1 2.50 30", "33.5", True),
        (SAMPLES, "3\n01 2.5\n3e1", "33.50", True),
        (SAMPLES, "1\n7", "7", True),
        (SAMPLES, "1\n7\n8", "7", True),
        (SAMPLES, "1\n70", "70", False),
        (SAMPLES, "2\n7 8", "15", False),
        (SAMPLES, "3\n1 2.5 31", "34.5", False),
        (ATCODER, "4\n10 20 30 40", "100", True),
        (ATCODER, "4\n10\n20\n30\n40\nend", "100", True),
        (ATCODER, "4\n10 20 30 41", "101", False),
        *((statement, "7", "14", True) for statement in (APPS, CODECHEF)),
        *((statement, "8", "16", False) for statement in (APPS, CODECHEF)),
        ("Input: 10\nOutput: 20", "1_0", "20", True),  # as int() reads them
        ("Input: 10\nOutput: 20", "\uff11\uff10", "20", True),
        ("Input: 10\nOutput: 20", "\u0661\u0660", "20", True),  # Arabic digits, which int() reads, too
        ("Input: 10\nOutput: 20", "\u0661\u0661", "22", False),
        (CASES, "1\n3 4", "7", True),  # each of its cases is an example
        (CASES, "2\n1 2\n3 4", "3\n7", True),
        (CASES, "2\n3 4\n5 6", "7\n11", True),
        (CASES, "1\n3 4", "8", False),
        (CASES, "2\n1 2\n5 6", "3\n11", False),
        (CASES, "1\n4 5", "9", False),
        (CASES, "1\n2", "2", False),
        (SAMPLES, "2\n2.5 30", "33.5", False),  # one sum, not a line for each
        (PROSE, "4\n10 20 30 40", "100", True),
        (PROSE, "4 10 20 30", "64", True),  # so many words of an input are no accident
        (PROSE, "4", "4", False),
        (PROSE, "5 10 20 30 40 50", "155", False),
        ("No example here.", "3", "6", False),
    ],
)
def test_inputs_of_programs(statement: str, given: str, expected: str, known: bool) -> None:
    problem = Problem(statement, TESTS)
    assert (parse_test(test_block(given, expected), problem) is None) is known


def test_a_sign_is_the_numbers() -> None:
    test = parse_test("Input: -5\nOutput: -10", Problem(LABELLED, TESTS))
    assert test == Exchange("-5\n", "-10\n")


LEETCODE = "Two sum.\n\nExample 1:\n\nInput: nums = [2,7,11,15], target = 9\nOutput: [0,1]\nExplanation: 2 + 7 is 9."
LCB = "Two sum.\n\nExample 1:\n\nInput:\n[2, 7, 11, 15]\n9\nOutput:\n[0, 1]"
DOCTEST = 'def two_sum(nums, target):\n    """Indices.\n    >>> two_sum([2, 7, 11, 15], 9)\n    [0, 1]\n    """'
ARROW = "Indices: `twoSum([2, 7, 11, 15], 9)  =>  [0, 1]`; two_sum([], 1) is []."
SENTENCE = "Two sum. Given [2, 7, 11, 15], 9 return [0, 1]. Given ('a b', 3) return None."
STARTER = "class Solution:\n    def two_sum(self, nums, target):"


@pytest.mark.parametrize("statement", [LEETCODE, LCB, DOCTEST, ARROW, SENTENCE])
@pytest.mark.parametrize(
    ("given", "expected", "known"),
    [
        ("[2, 7, 11, 15], 9", "[0, 1]", True),
        ("[2,7,11,15],9", "[0,1]", True),
        ("(2, 7, 11, 15), 9", "(0, 1)", True),
        ("nums=[2, 7, 11, 15], target=9", "[0, 1]", True),
        ("two_sum([2, 7, 0xB, 15], 9)", "[0, 1]", True),
        ("[2,\n 7,\n 11,\n 15], +9", "[False, 1][0:]", None),
        ("[2, 7, 11, 15], 10", "[]", False),
        ("[2, 7, 11], 9", "[0, 1]", False),
        ("[7, 2, 11, 15], 9", "[0, 1]", False),
        ("[12, 7, 11, 15], 19", "[0, 1]", False),
    ],
)
def test_arguments_of_functions(statement: str, given: str, expected: str, known: bool | None) -> None:
    problem = Problem(statement, (Call(([1], 2), 3),), "two_sum", starter=STARTER)
    assert (parse_test(test_block(given, expected), problem) is None) is (known is not False)


@pytest.mark.parametrize(
    ("statement", "given", "expected", "known"),
    [
        (ARROW, "[], 1", "[]", True),
        (ARROW, "[], 2", "[]", False),
        (SENTENCE, "'a b', 3", "None", True),
        (SENTENCE, '"a b", 3', "None", True),
        (SENTENCE, '"a c", 3', "None", False),
        ("two_sum(1.0, 'x') gives 2", "1, 'x'", "2", True),
        ("two_sum((1, [2]), {'a': (3,)}) gives 2", "[1, (2,)], {'a': [3]}", "2", True),
        ("two_sum(1, 2", "1, 2", "3", False),  # not closed
        ("two_sum(nums, target)", "1, 2", "3", False),
        ("other(1, 2) is 3", "1, 2", "3", False),
    ],
)
def test_other_notations_of_calls(statement: str, given: str, expected: str, known: bool) -> None:
    problem = Problem(statement, (Call(([1], 2), 3),), "two_sum", starter=STARTER)
    assert (parse_test(test_block(given, expected), problem) is None) is known
