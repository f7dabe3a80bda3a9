"""Validation tasks that are also training tasks: what is found, at what cost, and that runs refuse them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from fakes.jobs import asked

from verl_atgrpo import Environment, Outcome, Split, check_environment, make
from verl_atgrpo.cli import main
from verl_atgrpo.play import contamination, registry
from verl_atgrpo.play.contamination import NEAR, NearIndex, Overlap, overlaps, report, shingles
from verl_atgrpo.play.testing import EnvironmentContractError
from verl_atgrpo.train.config.job_rules import of_overlap
from verl_atgrpo.train.config.schema import AtGrpoConfig, ConfigError
from verl_atgrpo.train.config.section import parse_section

TRAIN = (
    "A train leaves the station at 9 o'clock and travels north at 60 miles per hour. Two hours later a second train "
    "leaves the same station and travels north on a parallel track at 80 miles per hour. How many hours does the "
    "second train need to catch up with the first?"
)
CHANGED_NUMBER = TRAIN.replace("80 miles", "90 miles")
REWORDED = TRAIN.replace("How many hours does the second train need to catch up", "When does it draw level")
SHORT = "Find the sum of all positive integers n for which n^2 + 12n - 2007 is a perfect square."
SHORT_CHANGED = SHORT.replace("2007", "2011")
UNRELATED = (
    "Let ABC be a triangle with a right angle at C, and let D be the foot of the altitude from C. The circle with "
    "diameter CD meets the sides at E and F. Prove that the lines AE and BF meet on the altitude, and find the ratio "
    "in which they divide it when AC is twice BC."
)


class Texts(Environment):
    """Problems in words, straight from two lists."""

    agents = ("solo",)

    def __init__(self, train: list[str] | None = None, val: list[str] | None = None) -> None:
        self.texts = {"train": train or [TRAIN, UNRELATED], "val": val or [SHORT, CHANGED_NUMBER]}

    def num_tasks(self, split: Split) -> int | None:
        return len(self.texts[split])

    def task(self, split: Split, index: int) -> str:
        return self.texts[split][index]

    def fingerprint(self, task: str) -> str:
        return task

    def dedup_text(self, task: str) -> str | None:
        return task

    async def run(self, task: str, team: Any) -> Outcome:
        raise NotImplementedError


def found(train: list[str], val: list[str]) -> list[Overlap]:
    return list(overlaps(Texts(train, val), len(train), len(val)))


def jaccard(one: set[str], other: set[str]) -> float:
    return len(one & other) / len(one | other)


def test_equal_tasks_are_found_whatever_their_texts_are_alike_to() -> None:
    assert found([UNRELATED, TRAIN, SHORT], [TRAIN, SHORT, SHORT]) == [
        Overlap(val=0, train=1),
        Overlap(val=1, train=2),
        Overlap(val=2, train=2),
    ]
    assert str(Overlap(val=1, train=2)) == "validation task 1 has the key of training task 2"


@pytest.mark.parametrize(
    ("train", "val"),
    [
        (TRAIN, CHANGED_NUMBER),
        (TRAIN, REWORDED),
        (SHORT, SHORT_CHANGED),
        (TRAIN, TRAIN.upper().replace(".", " ;")),
        (f"Solve this. {SHORT}", SHORT),
    ],
)
def test_nearly_equal_texts_are_found_in_both_directions(train: str, val: str) -> None:
    for one, other in ((train, val), (val, train)):
        (overlap,) = found([UNRELATED, one], [UNRELATED[:100], other])
        assert (overlap.train, overlap.val) == (1, 1)
        assert overlap.similarity is not None
        assert NEAR <= overlap.similarity <= 1


def test_other_problems_are_left_alone() -> None:
    assert found([UNRELATED, SHORT], [TRAIN]) == []
    # Few words, and one of them another: another problem. So is another sign, but for layout it is the same.
    assert found(["What is 3 + 4?", ""], ["What is 3 + 5?", "What is 3 - 4?", "", " "])[0].val == 2
    assert len(found(["What is 3 + 4?"], ["what is $3+4$"])) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is (7-2)*3+1?", "What is 7-(2*3+1)?"),
        ("How many zeros has 25! at its end?", "How many zeros has 25 at its end?"),
        ("What is |3-8|+2-5?", "What is 3-8+2-5?"),
        ("What is 1.25*4?", "What is 12.5*4?"),
    ],
)
def test_brackets_and_points_make_another_problem(one: str, other: str) -> None:
    assert found([one], [other]) == []
    assert found([f"{one}  "], [f" {one.lower()}"])[0].similarity == 1


def test_a_language_without_spaces_has_near_duplicates() -> None:
    told = "小明有三十二个苹果他每天吃掉两个又送给朋友五个另外还买了十个新鲜的苹果放在篮子里"
    (overlap,) = found([told + "请问小明在一个星期以后还剩下多少个苹果"], [told + "那么七天之后他还有几个苹果呢"])
    assert NEAR <= overlap.similarity < 1


class Turnable(Texts):
    """Two words in any order are the same problem; the order decides the split."""

    def fingerprint(self, task: str) -> str:
        return " ".join(sorted(task.split()))

    def task_key(self, task: str) -> str:
        return task

    def dedup_text(self, task: str) -> str | None:
        return None


def test_a_problem_in_both_splits_is_found_whatever_its_key_is() -> None:
    (overlap,) = overlaps(Turnable(["a b", "c d"], ["e f", "b a"]), 2, 2)
    assert str(overlap) == "validation task 1 has the fingerprint of training task 0"
    env = Turnable(["a b", "c d"], ["e f", "b a"])
    with pytest.raises(EnvironmentContractError, match=r"\(val, 1\) has the fingerprint of task \(train, 0\)"):
        check_environment(lambda: env)


def test_a_similarity_is_jaccards_of_the_shingles() -> None:
    (overlap,) = found([TRAIN], [CHANGED_NUMBER])
    assert overlap.similarity == pytest.approx(jaccard(shingles(TRAIN, 8), shingles(CHANGED_NUMBER, 8)))
    assert shingles("A, b c!", 2) == {"a b", "b c"}
    assert shingles("a b", 5) == {"a b"}
    assert shingles("?!", 5) == set()


def test_the_index_finds_what_comparing_every_pair_finds() -> None:
    rng = random.Random(0)
    texts = []
    for _ in range(60):  # few words, so that many texts share shingles, and copies with some words changed
        words = [rng.choice("abcd") for _ in range(rng.randrange(3, 60))]
        texts.append(" ".join(words))
        for _ in range(rng.randrange(3)):
            words[rng.randrange(len(words))] = "x"
        texts.append(" ".join(words))
    index = NearIndex(dict(enumerate(texts)))
    pairs = 0
    for text in texts:
        expected = {}
        for key, other in enumerate(texts):
            width = 8 if len(other.split()) >= 40 else 5
            if (similarity := jaccard(shingles(text, width), shingles(other, width))) >= NEAR:
                expected[key] = similarity
        assert index.near(text) == pytest.approx(expected)
        pairs += len(expected)
    assert pairs > 1.5 * len(texts)  # not only each itself


class Counted(dict[int, set[str]]):
    """Counts what is read of it."""

    reads = 0

    def __getitem__(self, key: int) -> set[str]:
        self.reads += 1
        return super().__getitem__(key)


def test_boilerplate_is_not_paid_for_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a plain inverted index: 5,000 texts against 500 would be 2,500,000 comparisons."""
    counted = Counted()

    class Watched(NearIndex):
        def __init__(self, texts: dict[int, str]) -> None:
            super().__init__(texts)
            counted.update(self._shingles)
            self._shingles = counted

    monkeypatch.setattr(contamination, "NearIndex", Watched)
    rng = random.Random(0)
    vocabulary = [f"w{number}" for number in range(3000)]
    preamble = "You are given a problem from a contest answer with one whole number and nothing else please "

    def text() -> str:
        return preamble + " ".join(rng.choices(vocabulary, k=45))

    train, val = [text() for _ in range(5_000)], [text() for _ in range(500)]
    for number in range(0, 500, 50):
        val[number] = train[9 * number].rpartition(" ")[0] + " other"
    overlapping = found(train, val)
    assert 0 < counted.reads < 5_000, "fewer than texts, and 2,500,000 pairs"
    assert [(overlap.val, overlap.train) for overlap in overlapping] == [(n, 9 * n) for n in range(0, 500, 50)]


def test_a_report_shows_the_first_and_counts_all() -> None:
    env = Texts([TRAIN] * 15 + [SHORT] * 15, [SHORT_CHANGED, TRAIN])
    text, any_overlap = report(env, 30, 2)
    lines = text.split("\n")
    assert any_overlap
    assert len(lines) == 21
    assert lines[0] == "validation task 1 has the key of training task 0"
    assert lines[19].startswith("validation task 0 is nearly training task 19 (similarity 0.")
    assert lines[-1] == "30 training (2 different) and 2 validation tasks: 15 with equal keys or fingerprints, 15 near"
    assert report(Texts([UNRELATED], [TRAIN]), 1, 1) == (
        "1 training and 1 validation task: 0 with equal keys or fingerprints, 0 near",
        False,
    )


@pytest.mark.parametrize("parts", [("walk", "texts"), ("texts", "walk")])
def test_parts_without_texts_take_none_from_others(parts: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._REGISTRY, "texts", lambda: Texts([TRAIN, SHORT], [SHORT_CHANGED, CHANGED_NUMBER]))
    both = make("mixture", parts={name: {"val_tasks": 2} for name in parts})
    assert report(both, 4, 4)[0].endswith("0 with equal keys or fingerprints, 2 near")
    assert report(make("walk"), 4, 4)[0].endswith("tasks have no text, so near duplicates were not searched for")


def settings(**changes: Any) -> AtGrpoConfig:
    return parse_section({"environment": {"name": f"{__name__}:Texts"}, **changes})


def test_near_duplicates_are_refused_with_one_line() -> None:
    config = settings()
    with pytest.raises(ConfigError, match=r"validation task 1 is nearly training task 0 .*allow_overlap") as caught:
        asked(of_overlap, config)
    assert "\n" not in str(caught.value)
    clean = settings(environment={"name": f"{__name__}:Texts", "val": [SHORT]})
    asked(of_overlap, clean)


def test_a_run_starts_with_them_only_where_the_recipe_accepts_it(compose: Any) -> None:
    from verl_atgrpo.train.config.run_check import check_run

    overrides = (
        "~at_grpo.environment",
        f"+at_grpo.environment={{name:'{__name__}:Texts'}}",
        "data.train_batch_size=2",
    )
    quick = (*overrides, "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    with pytest.raises(ConfigError, match=r"validation task 1 is nearly training task 0 .*allow_overlap"):
        check_run(compose("plan_path_cpu", *quick))
    check_run(compose("plan_path_cpu", *quick, "at_grpo.allow_overlap=true"))


def test_the_command_tells_of_a_recipe_what_it_shares(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("verl")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("""
defaults: [plan_path_cpu, _self_]
at_grpo: {val_tasks: 2}
""")
    command = ["data", "check", "--config-name=plan_path_cpu", "at_grpo.train_tasks=100", "at_grpo.val_tasks=10"]
    assert main(command) == 0
    assert capsys.readouterr().out == (
        "100 training and 10 validation tasks: 0 with equal keys or fingerprints, tasks have no text, so near "
        "duplicates were not searched for\n"
    )
    command = ["data", "check", f"--config-dir={tmp_path}", "--config-name=mine", "~at_grpo.environment"]
    assert main([*command, f"+at_grpo.environment={{name:'{__name__}:Texts'}}"]) == 1
    first, summary = capsys.readouterr().out.splitlines()
    assert first.startswith("validation task 1 is nearly training task 0 (similarity 0.")
    assert summary == "2 training and 2 validation tasks: 0 with equal keys or fingerprints, 1 near"


def test_a_recipe_that_is_not_there_ends_the_command_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("verl")
    with pytest.raises(SystemExit) as caught:
        main(["data", "check", "--config-name=no_such_recipe"])
    assert caught.value.code == 1
    assert "'no_such_recipe' cannot be composed" in capsys.readouterr().err
