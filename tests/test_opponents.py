"""The pool of opponents, and the ratings of its players."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest

from verl_atgrpo.play import opponents
from verl_atgrpo.play.opponents import Opponent, OpponentPool
from verl_atgrpo.play.ratings import elo, results


def pool(**options: Any) -> OpponentPool:
    given = {"policy": "player", "weights": {"current": 1, "past": 1}, "size": 3, "every": 5, **options}
    return OpponentPool(**given)


def filled(**options: Any) -> OpponentPool:
    made = pool(weights={"past": 1}, **options)
    for step in (0, 5, 10):
        made.freeze(step)
    return made


def drawn(made: OpponentPool, number: int = 2000) -> dict[int, float]:
    """Step of the past self -> its share of the draws."""
    counts = Counter(made.draw(7, task, 0).step for task in range(number))
    return {step: count / number for step, count in counts.items()}


def test_the_policy_as_it_is_plays_until_there_is_a_past_self() -> None:
    made = pool()
    assert {made.draw(1, task, 0) for task in range(50)} == {Opponent()}
    assert [made.is_due(step) for step in (0, 1, 5, 9, 10)] == [True, False, True, False, True]
    assert made.freeze(0) == 1
    assert {made.draw(1, task, 0) for task in range(50)} == {Opponent(), Opponent("player", 1, 0)}


def test_weights_are_shares_of_the_draws_and_a_draw_follows_from_its_place() -> None:
    made = pool(weights={"current": 1, "past": 2, "judge": 1, "never": 0})
    made.freeze(0)
    places = [(step, task, again) for step in (1, 2) for task in range(1000) for again in (0, 1)]
    kinds = Counter(str(made.draw(*place)) for place in places)
    shares = {kind: count / len(places) for kind, count in kinds.items()}
    assert shares == pytest.approx({"/0/0": 0.25, "judge/0/0": 0.25, "player/1/0": 0.5}, abs=0.03)
    assert [made.draw(*place) for place in places[:100]] == [made.draw(*place) for place in places[:100]]
    assert len({made.draw(1, task, 0) for task in range(20)} | {made.draw(1, task, 1) for task in range(20)}) > 1


def test_those_that_are_hard_to_beat_play_more_often() -> None:
    made = filled()
    # Won 2 of 2, 1 of 2, 0 of 2, with one won and one lost in advance: w = .75, .5, .25.
    rewards = {0: (1.0, 1.0), 5: (1.0, -1.0), 10: (-1.0, -1.0)}
    made.add([(Opponent("player", 1 + step // 5, step), both) for step, both in rewards.items()], 11)
    chances = [(1 - won) ** 2 for won in (0.75, 0.5, 0.25)]
    expected = {step: chance / sum(chances) for step, chance in zip((0, 5, 10), chances, strict=True)}
    assert drawn(made) == pytest.approx(expected, abs=0.04)
    uniform = filled(choose="uniform")
    uniform.add([(Opponent("player", 3, 10), [-1.0])] * 20, 11)
    assert drawn(uniform) == pytest.approx(dict.fromkeys((0, 5, 10), 1 / 3), abs=0.04)


def test_the_most_beaten_makes_room_and_among_equals_the_oldest() -> None:
    made = filled()
    made.add([(Opponent("player", 2, 5), [1.0])], 11)
    assert made.freeze(15) == 2
    assert made.slots == {1: 0, 2: 15, 3: 10}
    assert made.freeze(20) == 1
    assert made.slots == {1: 20, 2: 15, 3: 10}


def test_old_games_do_not_decide() -> None:
    made = filled()
    made.add([(Opponent("player", 1, 0), [-1.0])] * 100, 11)
    made.add([(Opponent("player", 1, 0), [1.0])] * 32, 12)
    assert made.freeze(15) == 1


def test_metrics_tell_kinds_apart_and_rate_the_policy() -> None:
    made = pool(weights={"current": 1, "past": 1, "judge": 1}, every=10)
    made.freeze(0)
    past, judge = Opponent("player", 1, 0), Opponent("judge")
    made.add([*((past, [one]) for one in (1.0, 1.0, 0.0, -1.0)), (Opponent(), [-1.0]), (judge, [0.0])], 7)
    found = made.metrics()
    shares = {name.removeprefix("opponents/"): value for name, value in found.items() if "elo" not in name}
    assert shares == {
        "past_selves": 1.0,
        **{"past/win": 0.5, "past/draw": 0.25, "past/loss": 0.25},
        **{"current/win": 0.0, "current/draw": 0.0, "current/loss": 1.0},
        **{"judge/win": 0.0, "judge/draw": 1.0, "judge/loss": 0.0},
    }
    # 2.5 of 4 are odds of 5 to 3, of which the prior takes a little.
    assert 0 < found["opponents/elo"] < 400 * math.log10(5 / 3)
    assert found["opponents/elo_margin"] > found["opponents/elo"], "four games do not tell who is stronger"
    made.add([], 8)
    assert {"opponents/past/win", "opponents/judge/win"}.isdisjoint(made.metrics())


@pytest.mark.parametrize(("step", "rated"), [(8, True), (9, False), (10, False), (13, False), (14, True)])
def test_games_against_itself_are_not_rated(step: int, rated: bool) -> None:
    """A past self of step 10 is as strong as the policy in steps 9 to 13, more or less."""
    made = filled()
    made.add([(Opponent("player", 3, 10), [1.0])], step)
    assert ("opponents/elo" in made.metrics()) == rated


def test_games_that_end_after_their_opponent_was_replaced_count_for_nobody() -> None:
    made = filled()
    made.add([(Opponent("player", 1, 0), [1.0])], 11)
    before = made.state()
    assert made.freeze(15) == 1
    made.add([(Opponent("player", 1, 0), [-1.0])] * 9, 16)
    assert made.state()["games"] == before["games"]
    assert 0 not in made.state()["recent"]
    assert made.metrics()["opponents/past/loss"] == 1.0


def test_games_of_a_task_are_one_observation() -> None:
    """Eight whole episodes of an opening that is won are all won."""
    alike, apart, one = filled(), filled(), filled()
    opponent = Opponent("player", 1, 0)
    alike.add([(opponent, [1.0] * 8), (opponent, [1.0] * 6 + [-1.0] * 2), (opponent, [-1.0] * 8)], 14)
    apart.add([(opponent, [1.0])] * 14 + [(opponent, [-1.0])] * 10, 14)
    one.add([(opponent, [1.0, 0.0]), (opponent, [1.0]), (opponent, [-1.0])], 14)
    few, many = alike.metrics(), apart.metrics()
    assert few["opponents/past/win"] == many["opponents/past/win"] == 14 / 24
    assert few["opponents/elo_margin"] > 1.5 * many["opponents/elo_margin"]
    assert few["opponents/elo"] == one.metrics()["opponents/elo"], "1.75 of 3"


def test_far_apart_past_selves_do_not_make_the_rating_an_old_one() -> None:
    """A policy that gains 8 points a step, with a past self every 50: at the end it is 592 above the first."""
    rng, made = random.Random(0), pool(weights={"past": 1}, size=8, every=50)
    for step in range(75):
        if made.is_due(step):
            made.freeze(step)
        drawn = [made.draw(step, task, 0) for task in range(64)]
        chances = [1 / (1 + 10 ** (-8 * (step - one.step) / 400)) for one in drawn]
        won = [[1.0 if rng.random() < chance else -1.0] for chance in chances]
        made.add(zip(drawn, won, strict=True), step + 1)
    assert made.metrics()["opponents/elo"] > 500


@pytest.mark.parametrize(("size", "every"), [(8, 5), (4, 5), (8, 1)])
def test_the_rating_follows_a_policy_that_becomes_stronger(size: int, every: int) -> None:
    """50 points between two past selves, 64 games a step: the rating is right to within a sixth."""
    rng, steps, gain = random.Random(0), 20 * every, 50 / every
    made = pool(weights={"past": 1}, size=size, every=every)
    made.freeze(0)
    for step in range(1, steps + 1):
        games = []
        for task in range(64):
            opponent = made.draw(step, task, 0)
            chance = 1 / (1 + 10 ** (-gain * (step - 1 - opponent.step) / 400))
            games.append((opponent, [1.0 if rng.random() < chance else -1.0]))
        made.add(games, step)
        if made.is_due(step):
            made.freeze(step)
    assert made.metrics()["opponents/elo"] == pytest.approx(gain * (steps - 1), rel=1 / 6)


@pytest.mark.parametrize("strong", [0.0, 300.0], ids=["as the policy", "one is stronger"])
def test_the_rating_of_a_long_run_stays_true(strong: float) -> None:
    """800 points in the first 100 of 400 steps, then a plateau; a strong past self stays in the pool for long."""
    rng, made = random.Random(1), pool(weights={"past": 1}, size=4, every=4)

    def strength(step: int) -> float:
        return 8.0 * min(step, 100) + strong * (step == 60)

    made.freeze(0)
    for step in range(1, 401):
        games = []
        for task in range(32):
            opponent = made.draw(step, task, 0)
            chance = 1 / (1 + 10 ** ((strength(opponent.step) - strength(step - 1)) / 400))
            games.append((opponent, [1.0 if rng.random() < chance else -1.0]))
        made.add(games, step)
        if made.is_due(step):
            made.freeze(step)
    rating = made.metrics()["opponents/elo"]
    assert rating == pytest.approx(800, rel=0.25)
    again = pool(weights={"past": 1}, size=4, every=4)
    again.restore(made.state())
    assert again.metrics()["opponents/elo"] == rating


def test_the_rating_of_a_policy_that_levels_off_stays_in_its_interval() -> None:
    """400 points within 18 steps, then none for 180: with one deviation for all neighbours they shrink to 230."""
    held, errors = 0, []
    for seed in range(6):
        rng, made = random.Random(seed), OpponentPool("player", {"current": 1, "past": 1}, 8, 5, "prioritized", seed)
        made.freeze(0)
        for step in range(1, 201):
            games = []
            for opponent in (made.draw(step, task, 0) for task in range(16)):
                lead = 400 * (math.exp(-opponent.step / 6) - math.exp(-(step - 1) / 6))
                chance = 1 / (1 + 10 ** (-lead / 400))
                games += [(opponent, [1.0 if rng.random() < chance else -1.0]) for _ in range(2) if opponent.slot]
            made.add(games, step)
            if made.is_due(step):
                made.freeze(step)
        found = made.metrics()
        errors.append(found["opponents/elo"] - 400)
        held += abs(errors[-1]) <= found["opponents/elo_margin"]
    assert held >= 5
    assert abs(sum(errors)) / len(errors) < 80


def test_a_rating_is_made_when_there_are_more_games(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a long run takes seconds."""
    made, rated = filled(), []
    monkeypatch.setattr(opponents, "elo", lambda games: rated.append(1) or elo(games))
    for step in range(14, 114):
        made.add([(Opponent("player", 1, 0), [1.0]), (Opponent("player", 2, 5), [-1.0])], step)
        assert "opponents/elo" in made.metrics()
    assert 20 < len(rated) < 50


def test_a_pool_that_begins_between_two_past_selves_rates_the_policy_above_the_one_it_beats() -> None:
    made = pool(weights={"past": 1}, every=20)
    made.freeze(26)
    for step in range(27, 35):
        made.add([(Opponent("player", 1, 26), [1.0])] * 5 + [(Opponent("player", 1, 26), [-1.0])], step)
        assert made.metrics()["opponents/elo"] > 0, step
    assert made.metrics()["opponents/elo"] > 100


def test_a_checkpoint_has_all_that_draws_and_ratings_follow_from() -> None:
    made = filled()
    made.add([(Opponent("player", 1, 0), [1.0]), (Opponent("player", 3, 10), [-1.0])] * 9, 11)
    again = pool(weights={"past": 1})
    again.restore(made.state())
    assert drawn(again) == drawn(made)
    assert again.freeze(15) == made.freeze(15)
    elo_of = {name: value for name, value in made.metrics().items() if "elo" in name}
    assert {name: again.metrics()[name] for name in elo_of} == elo_of
    with pytest.raises(ValueError, match=r"^at_grpo\.opponents: the checkpoint has past selves of player, "):
        pool(policy="other").restore(made.state())
    with pytest.raises(ValueError, match=r"^at_grpo\.opponents\.size=2: the checkpoint has a pool of 3; set it to"):
        pool(size=2).restore(made.state())


# --- ratings


def test_ratings_of_many_games_are_the_players_strengths() -> None:
    strengths = {0: 0.0, 5: 200.0, 10: -150.0}
    games = {}
    for one, other in ((5, 0), (10, 5), (10, 0)):
        chance = 1 / (1 + 10 ** ((strengths[other] - strengths[one]) / 400))
        games[one, other] = (chance * 1e6, 1e6)
    ratings = elo(games)
    assert {player: rating.points for player, rating in ratings.items()} == pytest.approx(strengths, abs=0.5)
    assert all(rating.margin < 2 for rating in ratings.values())
    assert ratings[0] == (0.0, 0.0)


@pytest.mark.parametrize("gain", [0.0, 30.0, 150.0])
def test_intervals_hold(gain: float) -> None:
    """Ten players, each stronger than the one before it by so many points, play 40 games against that one."""
    rng, held = random.Random(0), 0
    for _ in range(100):
        chance = 1 / (1 + 10 ** (-gain / 400))
        wins = [sum(rng.random() < chance for _ in range(40)) for _ in range(9)]
        rating = elo({(step + 1, step): (float(won), 40.0) for step, won in enumerate(wins)})[9]
        held += abs(rating.points - 9 * gain) <= rating.margin
    assert held >= 90


def test_a_policy_that_does_not_improve_is_rated_near_0() -> None:
    """The past self that loses by chance makes room, and its rating stays: were each free, the mean would be 73."""
    ratings = []
    for seed in range(6):
        rng, made = random.Random(seed), OpponentPool("player", {"current": 1, "past": 1}, 8, 5, "prioritized", seed)
        made.freeze(0)
        for step in range(1, 201):
            drawn = [one for task in range(32) if (one := made.draw(step, task, 0)).slot]
            made.add([(opponent, [rng.choice((1.0, -1.0))]) for opponent in drawn], step)
            if made.is_due(step):
                made.freeze(step)
        ratings.append(made.metrics())
        assert abs(ratings[-1]["opponents/elo"]) <= ratings[-1]["opponents/elo_margin"]
    assert sum(found["opponents/elo"] for found in ratings) / len(ratings) < 45


def test_players_that_won_or_lost_everything_have_ratings() -> None:
    won = elo({(1, 0): (30.0, 30.0)})[1]
    assert 300 < won.points < 2000
    # A drawn game tells next to nothing: half of its interval is that of the deviations together.
    assert elo({(1, 0): (0.5, 1.0)})[1] == pytest.approx((0, 260), abs=30)
    with pytest.raises(ValueError, match=r"a score of 3\.0 in 2\.0 games"):
        elo({(1, 0): (3.0, 2.0)})


def test_no_game_has_no_results() -> None:
    assert results([]) == {}
    assert results([2.0, -0.5, 0.0, 0.0]) == {"win": 0.25, "draw": 0.5, "loss": 0.25}
