"""Variants of the study, as overrides of the environment's recipe: tiny models' games, and games told in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sparse import PATH_BOARD, SOKOBAN_BOARD


@dataclass(frozen=True)
class Variant:
    """One way to train, or to combine models that other variants trained."""

    title: str
    overrides: tuple[str, ...] = ()
    share: float = 1.0
    """Share of the game's budget."""
    test_every: int | None = None
    """Training steps between two validations; None for the game's."""
    needs: tuple[str, ...] = ()
    """Models to combine without training, as `variant:policy`: the tool user's and the planner's."""
    rate: float = 1.0
    """Factor of the game's learning rate."""
    keep: bool = False
    """Whether to keep its models, which other variants need."""
    modules: str = ""
    """Modules of this folder that all processes import."""
    steps: int = 1000
    """Training steps at most, over which a learning rate that decays does so."""


def _tasks(number: int, updates: int = 2) -> tuple[str, ...]:
    """Returns overrides with so many tasks a step, in so many optimizer steps."""
    return (f"data.train_batch_size={number}", f"actor_rollout_ref.actor.ppo_mini_batch_size={number // updates}")


# Eight whole episodes per task, the outcome as the reward of all rows. Half of the tasks, because whole episodes take
# twice the tokens of a decision tree: a step generates about as many tokens as one of AT-GRPO at the start.
_EPISODES = ("at_grpo.scheme=parallel", *_tasks(16))

_SINGLE = ("at_grpo.environment.name={single}", "at_grpo.environment.tool=null")


def _wide(candidates: int) -> tuple[str, ...]:
    """Returns overrides with as many candidates per step as K = 8: more tasks, the same number of optimizer steps."""
    return (f"at_grpo.candidates={candidates}", *_tasks(32 * 8 // candidates))


# As many tasks a step as in the tree. K continuations of an episode are more samples than its tree: at first a step
# generates one and a half to three times the tokens, so 60,000 are few steps, two to four on Sudoku. With a quarter of
# the tasks they are as many steps as the tree's or more, of fewer rows.
def _branches(at: str, tasks: int = 32) -> tuple[str, ...]:
    return ("at_grpo.scheme=branch", f"+at_grpo.branch={{at: {at}}}", *(_tasks(tasks) if tasks < 32 else ()))


def _roles(tool_user: str, planner: str) -> tuple[str, ...]:
    return (
        "~at_grpo.agents",  # Hydra merges mappings
        "+at_grpo.agents={tool_user: tool_user, planner: planner}",
        f"at_grpo.policies={{tool_user: {{model: {{path: {tool_user}}}}}, planner: {{model: {{path: {planner}}}}}}}",
    )


# An adapter learns at a higher rate than a whole model: ten times, the usual rule of thumb, not tuned.
_ADAPTERS = (
    "~at_grpo.agents",
    "+at_grpo.agents={tool_user: tool_user, planner: planner}",
    "at_grpo.policies={tool_user: {base: one, lora: {rank: 16, alpha: 32}}, "
    "planner: {base: one, lora: {rank: 16, alpha: 32}}}",
)


VARIANTS: Mapping[str, Variant] = {
    "at_grpo": Variant("AT-GRPO, one policy, K = 8"),
    "single_grpo": Variant("single agent, GRPO", (*_SINGLE, *_EPISODES, "at_grpo.estimator=mas_grpo"), test_every=2),
    "single_at_grpo": Variant("single agent, AT-GRPO", _SINGLE),
    "team_grpo": Variant("team, GRPO (whole episodes)", (*_EPISODES, "at_grpo.estimator=mas_grpo"), test_every=2),
    "dr_mas": Variant("team, Dr. MAS (whole episodes)", (*_EPISODES, "at_grpo.estimator=dr_mas"), test_every=2),
    "branch_random": Variant("branches at a random decision, outcome", _branches("random")),
    "branch_first": Variant("branches at the first decision, outcome", _branches("first")),
    "branch_random_8": Variant("branches at a random decision, outcome, 8 tasks a step", _branches("random", 8)),
    "branch_first_8": Variant("branches at the first decision, outcome, 8 tasks a step", _branches("first", 8)),
    "at_grpo_roles": Variant("AT-GRPO, a policy per role", _roles("{model}", "{model}"), keep=True),
    "at_grpo_adapters": Variant("AT-GRPO, an adapter per role on one base", _ADAPTERS, rate=10.0),
    "swapped": Variant(
        "the same, roles swapped afterwards",
        _roles("{first}", "{second}"),
        needs=("at_grpo_roles:planner", "at_grpo_roles:tool_user"),
    ),
    "no_local": Variant("AT-GRPO without local reward", ("at_grpo.local_weight=0",)),
    "k2": Variant("AT-GRPO, K = 2", _wide(2)),
    "k4": Variant("AT-GRPO, K = 4", _wide(4)),
    "first": Variant("AT-GRPO, commits the first candidate", ("at_grpo.selection=first",)),
    "random": Variant("AT-GRPO, commits a random candidate", ("at_grpo.selection=random",)),
    "tool_user_alone": Variant("tool user alone (the single agent's prompts), AT-GRPO", _SINGLE, share=0.5, keep=True),
    "planner_alone": Variant(
        "planner alone, AT-GRPO", ("at_grpo.environment.name=planner_alone:{planner}",), share=0.5, keep=True
    ),
    "alone_in_team": Variant(
        "each trained alone, then put in the team",
        _roles("{first}", "{second}"),
        needs=("tool_user_alone:shared", "planner_alone:shared"),
    ),
    "colocate_async": Variant(
        "AT-GRPO, updates not waiting for the slowest episodes",
        # As in mode/async.yaml: the games' recipes are synchronous.
        (
            "at_grpo.mode=colocate_async",
            "trainer.v1.colocate_async.num_warmup_batches=1",
            "trainer.v1.sampler.max_off_policy_strategy=wait",
            "trainer.v1.sampler.max_off_policy_threshold=3",
            "algorithm.rollout_correction.rollout_is=token",
            "algorithm.rollout_correction.rollout_is_threshold=2.0",
        ),
    ),
}

OPTIMIZER_STEPS = (1, 2, 4, 8, 16)
"""Optimizer steps per training step of 32 tasks."""
UPDATES: Mapping[str, Variant] = {
    f"steps_{steps}": Variant(
        f"AT-GRPO, {steps} optimizer steps", (f"actor_rollout_ref.actor.ppo_mini_batch_size={32 // steps}",)
    )
    for steps in OPTIMIZER_STEPS
}
"""AT-GRPO with one policy, by optimizer steps."""

_LORA = ("actor_rollout_ref.model.lora_rank=16", "actor_rollout_ref.model.lora_alpha=32")
_ONE_ADAPTER = (*_LORA, *_EPISODES)
_UNDIVIDED = "at_grpo.estimator={preset: dr_mas, scale: none}"


def _levels(
    name: str, board: Mapping[str, object], levels: Sequence[str], bonus: float, length: int
) -> Mapping[str, Variant]:
    """Returns ways for a single agent to learn the last of some levels, by success alone; `length` is an answer's."""
    sparse = ", ".join([f"name: '{name}'", *(f"{key}: {value}" for key, value in board.items())])
    mixed = ", ".join(
        f"l{number}: {{{sparse}, {level}, val_tasks: {200 * (level == levels[-1])}}}"
        for number, level in enumerate(levels)
    )
    listed = ", ".join(f"{{{level}}}" for level in levels)

    def variant(title: str, environment: str) -> Variant:
        return Variant(
            title,
            (
                "~at_grpo.environment",
                f"+at_grpo.environment={{{environment}}}",
                *_EPISODES,
                _UNDIVIDED,
                "at_grpo.group_filter={}",
                # Or the entropy of near levels is too low to find far ones.
                f"actor_rollout_ref.actor.entropy_coeff={bonus}",
                "data.max_prompt_length=128",
                f"data.max_response_length={length}",
                f"actor_rollout_ref.rollout.max_model_len={128 + length}",
            ),
        )

    return {
        "far": variant("the last level alone", f"{sparse}, {levels[-1]}"),
        "far_uniform": variant("all levels alike", f"name: mixture, parts: {{{mixed}}}"),
        "far_curriculum": variant(
            "levels by a curriculum",
            f"name: curriculum, of: {{{sparse}}}, levels: [{listed}], window: 128, upper: 0.6",
        ),
    }


LEVELS = _levels(
    "sparse:Path",
    PATH_BOARD,
    (
        "max_distance: 2",
        "min_distance: 2, max_distance: 4",
        "min_distance: 4, max_distance: 6",
        "min_distance: 6, max_distance: 8",
        "min_distance: 8, max_distance: 10",
        "min_distance: 10",
    ),
    0.01,
    16,
)
"""Plan-Path by success alone, validated on far goals."""
SOKOBAN_LEVELS = _levels(
    "sparse:Sokoban",
    SOKOBAN_BOARD,
    (
        "max_solution: 4",
        *(f"min_solution: {least}, max_solution: {least + 2}" for least in (3, 4, 5, 6)),
        "min_solution: 8",
    ),
    0.02,
    8,
)
"""Sokoban by success alone, validated on whole boards."""


# A critic reads with the base of an adapter.
def _critic(**settings: object) -> tuple[str, ...]:
    given = ", ".join(f"{key}: {value}" for key, value in settings.items())
    return (*_ONE_ADAPTER, f"at_grpo.critic={{{given}}}", _UNDIVIDED)


def _likelihood(weight: float) -> tuple[str, ...]:
    lora = "lora: {rank: 16, alpha: 32}"
    return (
        "~at_grpo.agents",
        "+at_grpo.agents={all: player}",
        f"at_grpo.policies={{player: {{base: one, {lora}}}, critic: {{base: one, {lora}, optim: {{lr: 2e-3}}}}}}",
        f"at_grpo.critic={{kind: likelihood, policy: critic, weight: {weight}}}",
        *_EPISODES,
        _UNDIVIDED,
    )


_C3 = ("+credit=c3", "at_grpo.branch.at={tool_user: 0, planner: 0}", "at_grpo.candidates=4", *_tasks(8))
CRITIC: Mapping[str, Variant] = {
    "dr_mas_adapter": Variant("Dr. MAS, one adapter", (*_ONE_ADAPTER, "at_grpo.estimator=dr_mas"), rate=5),
    "dr_mas_undivided": Variant("the same, not divided", (*_ONE_ADAPTER, _UNDIVIDED), rate=5),
    "dr_mas_leave_one_out": Variant(
        "the same, against the other episodes",
        (*_ONE_ADAPTER, "at_grpo.estimator={preset: dr_mas, scale: none, center: leave_one_out}"),
        rate=5,
    ),
    "dr_mas_discount": Variant(
        "the same, discounted by .5",
        (*_ONE_ADAPTER, "at_grpo.estimator={preset: dr_mas, scale: none, discount: 0.5}"),
        rate=5,
    ),
    "critic": Variant("scores of a value critic, lambda .5", _critic(kind="value"), rate=5),
    "critic_lam_.9": Variant("the same, lambda .9", _critic(lam=0.9), rate=5),
    "critic_lam_0": Variant("the same, lambda 0", _critic(lam=0), rate=5),
    "critic_no_hindsight": Variant("the same, without hindsight", _critic(hindsight="false"), rate=5),
    "critic_no_past": Variant("the same, of the last step alone", _critic(decay=0), rate=5),
    "critic_random": Variant("the same, of random weights", _critic(kind="value"), rate=5, modules="random_critic"),
    "critic_likelihood": Variant("scores of a likelihood critic", _likelihood(1), rate=5),
    "critic_likelihood_half": Variant("the same, half of the reward", _likelihood(0.5), rate=5),
    "c3": Variant("C3 at each agent's first decision", _C3),
    "c3_adapter": Variant("the same, one adapter", (*_LORA, *_C3), rate=5),
}
"""Learned scores on tiny models, by the outcome alone, beside the same without a critic."""

_OF_SCORES = ("at_grpo.scheme=parallel", "at_grpo.episode_reward=scores")
_OF_OUTCOMES = ("at_grpo.scheme=parallel",)
# A sum of scores pays for long episodes. With own scores the rewards are AT-GRPO's; groups and commitment differ.
_OF_OWN_SCORES = ("at_grpo.scheme=parallel", "at_grpo.episode_reward=own")
# The recipe's bonus is added to all rows, and by the outcome most groups have nothing but it.
_NO_BONUS = "actor_rollout_ref.actor.entropy_coeff=0"
# One adapter for all agents, or one for each, at ten times the whole model's rate.
_ADAPTER = "model=smollm2_adapter"
_ADAPTER_EACH = (
    "~at_grpo.agents",
    "+at_grpo.agents={{agent_0}: {agent_0}, {agent_1}: {agent_1}}",
    "at_grpo.policies={{agent_0}: {base: smollm2, lora: {rank: 16, alpha: 32}}, "
    "{agent_1}: {base: smollm2, lora: {rank: 16, alpha: 32}}}",
)
_K_4 = "at_grpo.candidates=4"
_FILTERED = "at_grpo.group_filter={}"
_COSINE = "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"
# The tasks of a step are as many as in the tree: K whole episodes of a task have about as many candidates.
WORDS: Mapping[str, Variant] = {
    "at_grpo": VARIANTS["at_grpo"],
    "single_at_grpo": Variant("single agent, AT-GRPO", ("at_grpo.environment.name={single}",)),
    "team_grpo": Variant("team, GRPO, outcome", (*_OF_OUTCOMES, "at_grpo.estimator=mas_grpo")),
    "team_grpo_scores": Variant("team, GRPO, sum of scores", (*_OF_SCORES, "at_grpo.estimator=mas_grpo")),
    "dr_mas": Variant("team, Dr. MAS, outcome", (*_OF_OUTCOMES, "at_grpo.estimator=dr_mas")),
    "dr_mas_discount": Variant(
        "team, Dr. MAS, outcome, discounted", (*_OF_OUTCOMES, "at_grpo.estimator={preset: dr_mas, discount: 0.5}")
    ),
    "team_grpo_entropy_0": Variant(
        "team, GRPO, outcome, no entropy bonus", (*_OF_OUTCOMES, "at_grpo.estimator=mas_grpo", _NO_BONUS)
    ),
    "dr_mas_entropy_0": Variant(
        "team, Dr. MAS, outcome, no entropy bonus", (*_OF_OUTCOMES, "at_grpo.estimator=dr_mas", _NO_BONUS)
    ),
    "dr_mas_scores": Variant("team, Dr. MAS, sum of scores", (*_OF_SCORES, "at_grpo.estimator=dr_mas")),
    "dr_mas_own": Variant("team, Dr. MAS, own scores", (*_OF_OWN_SCORES, "at_grpo.estimator=dr_mas")),
    "at_grpo_roles": Variant("AT-GRPO, a policy per role", ("+roles={roles}",)),
    "at_grpo_adapters": Variant("AT-GRPO, an adapter per role on one base", _ADAPTER_EACH, rate=10.0),
    "at_grpo_adapter": Variant("AT-GRPO, one adapter", (_ADAPTER,), rate=10.0),
    "at_grpo_adapter_entropy_0": Variant("AT-GRPO, one adapter, no entropy bonus", (_ADAPTER, _NO_BONUS), rate=10.0),
    "at_grpo_adapter_cosine": Variant(
        "AT-GRPO, one adapter, its rate decays to 0 in 20 steps", (_ADAPTER, _COSINE), 2.0, rate=10.0, steps=20
    ),
    "at_grpo_adapters_filtered": Variant(
        "AT-GRPO, an adapter per role, no rows of groups without signal", (*_ADAPTER_EACH, _FILTERED), 1.4, rate=10.0
    ),
    "at_grpo_adapter_filtered": Variant(
        "AT-GRPO, one adapter, no rows of groups without signal", (_ADAPTER, _FILTERED), 1.4, rate=10.0
    ),
    "at_grpo_adapters_k_4": Variant("AT-GRPO, an adapter per role, K = 4", (*_ADAPTER_EACH, _K_4), 0.5, rate=10.0),
    "at_grpo_adapter_k_4": Variant("AT-GRPO, one adapter, K = 4", (_ADAPTER, _K_4), 0.5, rate=10.0),
    "team_grpo_adapter": Variant(
        "team, GRPO, outcome, one adapter", (_ADAPTER, *_OF_OUTCOMES, "at_grpo.estimator=mas_grpo"), rate=10.0
    ),
    "dr_mas_adapter": Variant(
        "team, Dr. MAS, outcome, one adapter", (_ADAPTER, *_OF_OUTCOMES, "at_grpo.estimator=dr_mas"), rate=10.0
    ),
    "team_grpo_adapter_entropy_0": Variant(
        "team, GRPO, outcome, one adapter, no entropy bonus",
        (_ADAPTER, *_OF_OUTCOMES, "at_grpo.estimator=mas_grpo", _NO_BONUS),
        rate=10.0,
    ),
    "dr_mas_own_adapter": Variant(
        "team, Dr. MAS, own scores, one adapter", (_ADAPTER, *_OF_OWN_SCORES, "at_grpo.estimator=dr_mas"), rate=10.0
    ),
    "critic": Variant(
        "team, outcome, scores of a value critic",
        (_ADAPTER, *_OF_OUTCOMES, "at_grpo.critic={kind: value}", _UNDIVIDED, _NO_BONUS, "at_grpo.group_filter=null"),
        rate=10.0,
    ),
    "dr_mas_adapter_entropy_0": Variant(
        "the same, without a critic", (_ADAPTER, *_OF_OUTCOMES, _UNDIVIDED, _NO_BONUS), rate=10.0
    ),
    "c3_adapter": Variant(
        "team, C3 at each agent's first decision, one adapter",
        (_ADAPTER, "+credit=c3", "at_grpo.branch.at={{agent_0}: 0, {agent_1}: 0}", _K_4, *_tasks(5, 1), _NO_BONUS),
        rate=10.0,
    ),
    "dr_mas_adapter_discount": Variant(
        "Dr. MAS as above, discounted by .5",
        (_ADAPTER, *_OF_OUTCOMES, "at_grpo.estimator={preset: dr_mas, scale: none, discount: 0.5}", _NO_BONUS),
        rate=10.0,
    ),
}
"""Ways to train an instruct model on games told in words."""
LATE: Mapping[str, Variant] = {
    name: replace(WORDS[name], share=1.6)
    for name in ("critic", "dr_mas_adapter_entropy_0", "c3_adapter", "dr_mas_adapter_discount")
}
"""Those that learn the walk late."""
MIXTURE: Mapping[str, Variant] = {
    "mixture": Variant("three games in one run"),
    "mixture_by_task": Variant(
        "the same, advantages standardised by game", ("at_grpo.estimator={preset: at_grpo, by_task: tokens}",)
    ),
}
"""Three games told in words in one run, to compare with a run of each on a third of the tokens."""
OPPONENTS: Mapping[str, Variant] = {
    "past_selves": Variant("against itself and its past selves"),
    "current_self": Variant("against itself as it is", ("at_grpo.opponents.past=0", "~at_grpo.policies.player.base")),
}
"""Self-play, validated as games that are not lost to a random and to a perfect player."""
SETTINGS: Mapping[str, Variant] = {
    "clip_1": Variant("gradients clipped to 1", ("actor_rollout_ref.actor.optim.clip_grad=1",)),
    "team_grpo_clip_1": Variant(
        "team, GRPO, outcome, gradients clipped to 1",
        (*_OF_OUTCOMES, "at_grpo.estimator=mas_grpo", "actor_rollout_ref.actor.optim.clip_grad=1"),
    ),
    "k_4": Variant("K = 4", (_K_4,), 0.6),
    "k_16": Variant("K = 16", ("at_grpo.candidates=16",)),
    "entropy_0": Variant("no entropy bonus", (_NO_BONUS,)),
    "entropy_.03": Variant("entropy bonus .03", ("actor_rollout_ref.actor.entropy_coeff=0.03",)),
    "by_task": Variant(
        "advantages standardised over tokens", ("at_grpo.estimator={preset: at_grpo, by_task: tokens}",)
    ),
    "filtered": Variant("no rows of groups without signal", ("at_grpo.group_filter={}",)),
}
"""Settings beside those of AT-GRPO in the recipe, one at a time."""


@dataclass(frozen=True)
class Game:
    """An environment of the study."""

    recipe: str
    budget: int
    """Budget of generated training tokens of a variant, all candidates included."""
    single: str
    """Its environment for a single agent."""
    learning_rate: float
    """Learning rate of the variants with `rate` 1."""
    variants: Mapping[str, Variant]
    planner: str = ""
    """Its environment for the planner alone (`planner_alone`)."""
    test_every: int = 3
    """Most training steps between two validations."""
    model: Path | None = None
    """The starting model; None for one that is made for the game."""
    start: str | None = None
    """The demonstrator of the model that is made, if it is not the game's."""
    selection_seed: int = 3
    """The seed that selects learning rates. With an instruct model it is one of those compared: a seed takes hours."""
    overrides: tuple[str, ...] = ()
    """What all variants change about the recipe."""

    def at_rate(self, name: str, rate: float) -> str:
        """Returns the name of a variant at a learning rate: `dr_mas@3e-05`, or its own name at its own rate."""
        return name if math.isclose(rate, self.learning_rate * self.variant(name).rate) else f"{name}@{rate:g}"

    def variant(self, name: str) -> Variant:
        """Returns a variant by its name, with or without a learning rate, or raises ValueError."""
        plain, _, rate = name.partition("@")
        found = self.variants.get(plain) or ({**UPDATES, **CRITIC}.get(plain) if self.model is None else None)
        if found is None:
            raise ValueError(f"--variants {name}: {self.recipe} has {', '.join(self.variants)}")
        return replace(found, rate=float(rate) / self.learning_rate) if rate else found


def _told_in_words(name: str, budget: int, variants: Mapping[str, Variant]) -> Game:
    """Returns a game that SmolLM2 plays, in the precision and at its recipe's learning rate under `make`."""
    return Game(
        f"{name}_smollm2",
        budget,
        f"{name}_single",
        5e-5,
        variants,
        test_every=5,
        model=Path("runs/models/smollm2"),
        selection_seed=0,
        overrides=("precision=bf16",),
    )


GAMES: Mapping[str, Game] = {
    "plan_path": Game("plan_path_cpu", 60_000, "plan_path_single", 7e-4, VARIANTS, "PlanPathPlanner"),
    # The recipe's learning rate, three times this one, is for a short run: the entropy soon collapses.
    # Learned in a few steps, so every other step is validated.
    "sudoku": Game("sudoku_cpu", 60_000, "sudoku_single", 2.5e-4, VARIANTS, "SudokuPlanner", 2),
    "walk": _told_in_words("walk", 15_000, {**WORDS, **LATE, **SETTINGS}),
    "walk_walls": _told_in_words("walk_walls", 30_000, WORDS),
    "number_search": _told_in_words("number_search", 30_000, {**WORDS, **SETTINGS}),
    "far_goals": Game(
        "plan_path_cpu", 90_000, "plan_path_single", 7e-4, LEVELS, test_every=10, start="sparse:NEAR_GOALS"
    ),
    "sokoban": Game(
        "plan_path_cpu", 250_000, "sokoban_single", 3e-4, SOKOBAN_LEVELS, test_every=10, start="sparse:LAST_MOVES"
    ),
    "tic_tac_toe": Game("tic_tac_toe_cpu", 250_000, "tic_tac_toe", 2e-3, OPPONENTS, test_every=10),
    "connect_four": Game("connect_four_cpu", 250_000, "connect_four", 2e-3, OPPONENTS, test_every=10),
    "mixture": replace(
        _told_in_words("walk", 36_000, MIXTURE),
        test_every=6,
        overrides=(
            "precision=bf16",
            "~at_grpo.environment",
            "+at_grpo.environment={name: mixture, parts: {walk: {}, walk_walls: {}, number_search: {}}}",
            "at_grpo.val_tasks=300",
            "at_grpo.group_filter={}",  # as among walls
            "data.val_batch_size=300",
            *_tasks(12, 1),
        ),
    ),
}
ALL: Mapping[str, Variant] = {**VARIANTS, **WORDS, **SETTINGS, **MIXTURE, **OPPONENTS, **UPDATES, **LEVELS, **CRITIC}
"""All names of variants, in the order of tables."""
