"""TextArena: games that use global random numbers, invalid moves, opponents, invalid options."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import pytest

textarena = pytest.importorskip("textarena")

from fakes.scripted_episodes import here, prompt_of, scripted

from verl_atgrpo import EnvironmentConfigError, Outcome, Score, ScriptedTeam, check_environment, make, play
from verl_atgrpo.play.testing import Script
from verl_atgrpo.play.types import EpisodeRecord

GUESS = {"game": "GuessTheNumber-v0-train", "max_steps": 6}
NIM = {"game": "Nim-v0", "players": 2, "shared_openings": True}


def number_of(env: Any, task: int) -> int:
    """Returns the number to guess from the game's state."""
    for number in range(1, 21):
        answer = f"[{number}]"
        if scripted(env, task, alone(lambda prompt, k, answer=answer: answer)).outcome.success:
            return number
    raise AssertionError("no number is right")


def alone(script: Script) -> Mapping[str, Script]:
    return {"player_0": script}


def test_guessing_keeps_the_contract() -> None:
    env = make("textarena", **GUESS)

    def gold(task: int) -> Mapping[str, Script]:
        number = number_of(env, task)
        return alone(lambda prompt, k: f"[{number}]")

    check_environment("textarena", GUESS, gold=gold, tasks=6, episodes=1)


@pytest.mark.parametrize("game", ["2048-v0-ultra-easy", "Mastermind-v0", "FrozenLake-v0-random", "Secretary-v0"])
def test_games_with_random_numbers_at_reset_or_later_keep_it(game: str) -> None:
    check_environment(here("textarena"), {"game": game, "max_steps": 3}, tasks=4, episodes=1)


def test_interleaved_episodes_do_not_affect_each_other_or_global_generators() -> None:
    env = make("textarena", game="2048-v0-ultra-easy", max_steps=6)  # a tile is drawn after each move
    tasks = [env.task("train", index) for index in range(3)]
    team = alone(lambda prompt, k: ["[up]", "[left]", "[down]", "[right]"][(len(prompt) + k) % 4])
    by_itself = [scripted(env, task, team, candidates=3) for task in tasks]
    ours = random.getstate()

    async def at_once() -> list[EpisodeRecord]:
        return await asyncio.gather(*(play(env, task, ScriptedTeam(team, candidates=3)) for task in tasks))

    together = asyncio.run(at_once())
    assert random.getstate() == ours
    assert [record.decisions for record in together] == [record.decisions for record in by_itself]
    assert len({str(record.decisions[-1].prompt_ids) for record in together}) == 3


def test_an_invalid_move_earns_the_least_whatever_the_game_s_reward() -> None:
    env = make("textarena", **GUESS)
    task = env.task("train", 0)
    number = number_of(env, task)
    near = number + 1 if number < 20 else number - 1
    replies = iter([f"[{near}]", "[99]", "[99]"])
    asked: dict[str, str] = {}
    record = scripted(env, task, alone(lambda prompt, k: asked.setdefault(prompt, "") or next(replies)))
    scores = [decision.candidates[0].score for decision in record.decisions]
    assert scores == [Score(), Score(-1, -1), Score(-1, -1)]
    assert record.outcome.team_reward > 0.5 and not record.outcome.success  # the game's reward for being close
    assert record.outcome.metrics["illegal"] == 2
    (only,) = scripted(env, task, alone(lambda prompt, k: f"[{number}]")).decisions
    assert only.candidates[0].score == Score(1, 1)


def test_two_players_earn_their_own_rewards_and_the_team_is_as_given() -> None:
    both = make("textarena", **NIM)
    one = make("textarena", **NIM, team=["player_0"])
    task = both.task("train", 0)
    # Takes whole piles: with three of them, the first player takes the last one.
    piles = [f"[{pile} {size}]" for pile, size in enumerate((3, 4, 5))]

    def scripts() -> Mapping[str, Script]:
        moves = iter(piles)
        return dict.fromkeys(("player_0", "player_1"), lambda prompt, k: next(moves))

    record = scripted(both, task, scripts())
    assert [decision.agent for decision in record.decisions] == ["player_0", "player_1", "player_0"]
    assert record.decisions[-1].candidates[0].score == Score(0, 1)
    assert record.outcome.team_reward == 0 and not record.outcome.success
    record = scripted(one, task, scripts())
    assert record.decisions[-1].candidates[0].score == Score(1, 1)
    assert record.outcome.success and record.outcome.metrics["return_player_1"] == -1


@pytest.mark.parametrize(
    ("reply", "lost"),
    [
        ("raise:", False),
        ("deep:", False),
        pytest.param("leave:", True, marks=pytest.mark.slow),
        pytest.param("count:", True, marks=pytest.mark.slow),
        pytest.param("copies:xx", True, marks=pytest.mark.slow),
        pytest.param("power:", True, marks=pytest.mark.slow),
        pytest.param("match:" + "a" * 200, True, marks=pytest.mark.slow),
    ],
)
def test_a_reply_that_the_game_cannot_bear_is_illegal(
    reply: str, lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    import fakes.careless_game  # noqa: F401

    env = make("textarena", game="Careless-v0", max_steps=2, on_illegal="again")
    replies = iter([reply, "[21]"])
    record = scripted(env, env.task("train", 0), alone(lambda prompt, k: next(replies)))
    assert [decision.candidates[0].score for decision in record.decisions] == [Score(-1, -1)] * 2
    said = "takes too much time or memory" if lost else "raises on a reply"
    assert sum(said in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "game='': TextArena has no such game"),
        ({"game": "Guess-v0"}, "no such game"),
        ({"game": "GuessTheNumber-v0", "players": 2}, "players=2.*cannot be made, AssertionError"),
        ({"game": "GuessTheNumber-v0", "players": 0}, "players=0"),
        ({"game": "GuessTheNumber-v0", "options": {"highest": 9}}, "cannot be made, TypeError.*highest"),
        ({"game": "GuessTheNumber-v0-raw"}, "observations are no texts.*without -raw"),
        ({"game": "Nim-v0", "players": 2}, "same opening.*shared_openings=true"),
        ({"game": "GuessTheNumber-v0", "team": ["player_1"]}, "team: 'player_1' is not an agent here"),
    ],
)
def test_options_are_refused_with_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=message) as caught:
        make("textarena", **options)
    assert str(caught.value).startswith("at_grpo.environment.") and "\n" not in str(caught.value)


def test_a_game_of_more_players_than_the_recipe_has_is_named() -> None:
    """Not every game asserts their number when it is made."""
    env = make("textarena", game="QuantumTicTacToe-v0", shared_openings=True)
    with pytest.raises(EnvironmentConfigError, match=r"players=1: QuantumTicTacToe-v0 has a player_1; raise it"):
        scripted(env, env.task("train", 0), alone(lambda prompt, k: "[0,1]"))


def test_a_move_may_be_said_again_in_the_same_words() -> None:
    """The game's text has what players said before."""
    env = make("textarena", game="PigDice-v0", players=2, shared_openings=True, max_steps=6)
    said = "My turn total is still low, so I roll the die once more: [roll]"
    record = scripted(env, env.task("train", 0), dict.fromkeys(env.agents, lambda prompt, k: said))
    assert record.outcome.metrics["illegal"] == 0 and len(record.decisions) == 6
    assert said.casefold() in str(prompt_of(record.decisions[-1])).casefold()


@pytest.mark.parametrize(
    ("game", "players"),
    [
        ("FrozenLake-v0", 1),
        ("FrozenLake-v0-random", 1),
        ("GuessTheNumber-v0-train", 1),
        ("2048-v0-ultra-easy", 1),
        ("Secretary-v0", 1),
        ("TicTacToe-v0", 2),
        ("Nim-v0", 2),
    ],
)
def test_who_repeats_a_prompt_earns_what_silence_earns(game: str, players: int) -> None:
    """Games look for a move anywhere in a reply, and their prompts have examples of all."""
    env = make("textarena", game=game, players=players, shared_openings=True, max_steps=6)
    task = env.task("train", 0)

    def played(script: Script) -> Outcome:
        return scripted(env, task, dict.fromkeys(env.agents, script)).outcome

    silent = played(lambda prompt, k: "\n")
    for echo in (
        lambda prompt, k: prompt,
        lambda prompt, k: " ".join(prompt.split()),
        lambda prompt, k: prompt[len(prompt) // 3 :],
        lambda prompt, k: f"{prompt}\n{prompt}",
        lambda prompt, k: f"I was asked: {prompt.upper()}",
    ):
        assert played(echo) == silent
