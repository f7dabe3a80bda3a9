"""AT-GRPO in one file: two agents learn to reach a goal together, in seconds on a CPU. It needs PyTorch only.

    python examples/at_grpo_in_one_file.py             # one policy for both agents
    python examples/at_grpo_in_one_file.py --roles     # a policy for each

A walker stands on a grid of 5 x 5. The scout sees walker and goal, and writes a note of three compass letters, NESW.
The pilot sees only the note, and presses three keys, ^>v<. They have three turns. Notes and keys of one episode:

    step   0   success   6%   _3N ^^v s22 2_^ <24 ps4
    step  70   success 100%   WSW <v<

The headings name the file that does each part in verl_atgrpo, where agents are LLMs on vLLM, FSDP and Ray.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

Cell = tuple[int, int]

# -------------------- the game: environments/plan_path/environment.py

SIZE, TURNS, LENGTH = 5, 3, 3
STEPS = ((0, 1), (1, 0), (0, -1), (-1, 0))
MOVES = {"scout": dict(zip("NESW", STEPS, strict=True)), "pilot": dict(zip("^>v<", STEPS, strict=True))}


def walk(cell: Cell, goal: Cell, agent: str, reply: str) -> Cell:
    """Follows an agent's letters up to the goal; other letters, and steps off the grid, do nothing."""
    for letter in reply:
        step = MOVES[agent].get(letter, (0, 0))
        ahead = (cell[0] + step[0], cell[1] + step[1])
        if cell != goal and all(0 <= part < SIZE for part in ahead):
            cell = ahead
    return cell


def score(agent: str, walker: Cell, goal: Cell, reply: str) -> tuple[float, float]:
    """Returns the two parts of a reply's reward: the team's, and the agent's own (local)."""
    before, after = (abs(x - goal[0]) + abs(y - goal[1]) for x, y in (walker, walk(walker, goal, agent, reply)))
    team = 1 - after / before  # 1 at the goal, below 0 on a way back; a note earns what its own way would
    local = sum(letter in MOVES[agent] for letter in reply) / LENGTH  # the share of letters that the agent may use
    return team, local


def play(walker: Cell, goal: Cell, team: Team) -> bool:
    """Plays an episode. This is the whole workflow: who acts when, what the prompt shows, how a reply is scored."""
    for _ in range(TURNS):
        note = team.act("scout", f"s{walker[0]}{walker[1]}{goal[0]}{goal[1]}", partial(score, "scout", walker, goal))
        keys = team.act("pilot", f"p{note}", partial(score, "pilot", walker, goal))
        walker = walk(walker, goal, "pilot", keys)
        if walker == goal:
            return True
    return False


# -------------------- a decision: verl_atgrpo/play/team.py and scoring.py


@dataclass
class Team:
    """Samples, scores and commits its agents' replies, and keeps all candidates to train on."""

    policies: dict[str, Policy]
    k: int
    alpha: float = 1.0
    said: list[str] = field(default_factory=list)
    groups: list[tuple[Policy, Tensor, Tensor]] = field(default_factory=list)

    def act(self, agent: str, prompt: str, score: Callable[[str], tuple[float, float]]) -> str:
        """Makes a decision (episode, agent, turn): K candidates answer one prompt, and the best one is returned."""
        tokens = self.policies[agent].sample(prompt, self.k)
        replies = ["".join(VOCABULARY[token] for token in row[PROMPT:]) for row in tokens.tolist()]
        rewards = torch.tensor([self.alpha * team + local for team, local in map(score, replies)])
        # The K candidates are a group: rows with the same tag, verl_atgrpo/train/rollout/episode_rows.py.
        self.groups.append((self.policies[agent], tokens, rewards))
        # Committed before the next agent acts: the pilot reads the best of K notes, the walker moves by the best keys.
        self.said.append(replies[int(rewards.argmax())])
        return self.said[-1]


# -------------------- a policy, in the place of an LLM: verl_atgrpo/train/rollout/policy.py

VOCABULARY = "_sp01234NESW^>v<"  # _ stands where nothing is written yet
PROMPT = 5


class Policy(nn.Module):
    """A language model of 19,000 weights: sees the prompt and the reply so far, predicts the reply's next letter."""

    def __init__(self) -> None:
        super().__init__()
        letters, width = len(VOCABULARY), 16
        self.embed = nn.Embedding(letters, width)
        self.body = nn.Sequential(nn.Linear(width * (PROMPT + LENGTH), 128), nn.Tanh(), nn.Linear(128, letters))
        self.optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)

    def next_letter(self, tokens: Tensor, place: int) -> Tensor:
        """Returns the log-probs of every letter at a place of the reply: (N, PROMPT + LENGTH) -> (N, letters)."""
        seen = tokens.clone()
        seen[:, place:] = 0
        logits: Tensor = self.body(self.embed(seen).flatten(1))
        return logits.log_softmax(-1)

    @torch.no_grad()
    def sample(self, prompt: str, k: int) -> Tensor:
        """Returns the prompt with K replies to it: (K, PROMPT + LENGTH)."""
        tokens = torch.tensor([[VOCABULARY.index(letter) for letter in prompt.ljust(PROMPT + LENGTH, "_")]] * k)
        for place in range(PROMPT, PROMPT + LENGTH):
            tokens[:, place] = self.next_letter(tokens, place).exp().multinomial(1)[:, 0]
        return tokens

    def log_probs(self, tokens: Tensor) -> Tensor:
        """Returns the log-probs of the replies' letters: (N, PROMPT + LENGTH) -> (N, LENGTH)."""
        places = range(PROMPT, PROMPT + LENGTH)
        return torch.cat([self.next_letter(tokens, at).gather(1, tokens[:, at, None]) for at in places], dim=1)


# -------------------- advantages: verl_atgrpo/train/estimators/at_grpo.py, grpo.py


def advantages(rewards: Tensor) -> Tensor:
    """Compares the candidates of a decision with each other: (K,) -> (K,), all 0 if they are equally good."""
    deviation = rewards - rewards.mean()
    return deviation / (rewards.std() + 1e-6) if deviation.abs().max() > 1e-6 else torch.zeros_like(rewards)


# -------------------- the update of a policy: verl_atgrpo/train/trainer/update_inputs.py


def update(policy: Policy, groups: list[tuple[Policy, Tensor, Tensor]], clip: float = 0.2, batches: int = 2) -> None:
    """Trains a policy on the rows of the agents that it plays, by PPO's clipped objective, a mean over letters."""
    own = [(tokens, advantages(rewards)) for by, tokens, rewards in groups if by is policy]
    tokens, gains = (torch.cat(column) for column in zip(*own, strict=True))
    with torch.no_grad():
        old = policy.log_probs(tokens)
    for batch in torch.randperm(len(tokens)).chunk(batches):
        # In the second mini-batch the policy is no longer the one that sampled: hence the ratio, and its bounds.
        ratio = (policy.log_probs(tokens[batch]) - old[batch]).exp()
        gain = gains[batch, None]
        loss = -torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain).mean()
        policy.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        policy.optimizer.step()


# -------------------- the training: verl_atgrpo/train/trainer/trainer.py


def train(steps: int, roles: bool, k: int, seed: int, episodes: int = 16) -> list[float]:
    """Trains a team; prints and returns its success on goals that it is not trained on, every 10 steps."""
    torch.manual_seed(seed)
    cells = [(x, y) for x in range(SIZE) for y in range(SIZE)]
    tasks = [(walker, goal) for walker in cells for goal in cells if walker != goal]
    rng = random.Random(seed)
    held_out = rng.sample(cells, 4)  # goals: a walker comes to any cell
    validation, training = ([task for task in tasks if (task[1] in held_out) is held] for held in (True, False))
    shared = Policy()
    policies = {"scout": shared, "pilot": Policy() if roles else shared}  # the key at_grpo.agents
    successes = []
    print(f"On the right: notes and keys on the way from {validation[-1][0]} to {validation[-1][1]}")
    for step in range(steps + 1):
        if step % 10 == 0:
            # One candidate for each decision, as when the team is used.
            teams = [Team(policies, k=1) for _ in validation]
            solved = [play(*task, team) for task, team in zip(validation, teams, strict=True)]
            successes.append(sum(solved) / len(solved))
            bar = "#" * round(30 * successes[-1])
            print(f"step {step:3d}   success {successes[-1]:4.0%} {bar:30}   {' '.join(teams[-1].said)}", flush=True)
        team = Team(policies, k)
        for task in rng.sample(training, episodes):
            play(*task, team)
        for policy in dict.fromkeys(policies.values()):
            update(policy, team.groups)
    return successes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--roles", action="store_true", help="a policy for each agent, in the place of one for both")
    parser.add_argument("--k", type=int, default=8, help="candidates for each decision")
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))
