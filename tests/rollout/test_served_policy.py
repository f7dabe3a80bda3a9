"""Sampling candidates from verl's servers: what fails an episode, and what a server receives."""

from __future__ import annotations

import asyncio
import types
from typing import Any

import pytest

pytest.importorskip("verl")

from fakes.simulated_servers import Letters
from waiting import HANG

from verl_atgrpo import EpisodeFailed
from verl_atgrpo.lab.tiny_models.tiny import build_tokenizer
from verl_atgrpo.play.thoughts import split_thought
from verl_atgrpo.play.types import ReplyLimits
from verl_atgrpo.train.chat import Chat
from verl_atgrpo.train.config.schema import SamplingSettings
from verl_atgrpo.train.rollout.policy import ServedPolicy


class Server:
    """Gives every request the same answer and records the sampling parameters."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.params: list[dict[str, Any]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        self.params.append(sampling_params)
        if self.answer == "never":
            await asyncio.Event().wait()
        return self.answer


def output(token_ids: list[int], stop_reason: str = "completed") -> Any:
    return types.SimpleNamespace(
        token_ids=token_ids,
        log_probs=[-0.5] * len(token_ids),
        stop_reason=stop_reason,
        extra_fields={"min_global_steps": 3, "max_global_steps": 4},
    )


def policy(answer: Any, **changes: Any) -> ServedPolicy:
    settings: dict[str, Any] = {
        "client": Server(answer),
        "chat": Chat(Letters()),
        "sampling_params": {"temperature": 1.0, "top_p": 1.0, "top_k": -1},
        "max_prompt_length": 8,
        "max_response_length": 4,
        "request_timeout": HANG,
    }
    return ServedPolicy(**{**settings, **changes})


@pytest.mark.parametrize(
    ("answer", "stop", "text"),
    [
        ("<|channel|>final<|message|>42", (), "42"),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>42",
            (),
            "<think>Hm.</think>42",
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>42 STOP it",
            ("STOP",),
            "<think>Hm.</think>42",
        ),
        ("42", (), "42"),
    ],
)
def test_without_tools_too_a_thought_of_gpt_oss_is_no_part_of_what_it_says(
    answer: str, stop: tuple[str, ...], text: str
) -> None:
    """Its channels are special tokens, and a decoded answer would run thought and answer together."""
    tokenizer = build_tokenizer(("<|start|>", "<|channel|>", "<|message|>"))
    chat = Chat(tokenizer, format="gpt-oss")
    served = policy(output(tokenizer.encode(answer)), chat=chat, max_response_length=200, stop=stop)
    assert sample(served).text.strip() == text
    assert split_thought(text)[1] == "42"


def test_a_prompt_of_a_megabyte_is_refused_before_it_is_tokenized() -> None:
    served = policy(output([1]))
    served.chat.tokenizer = None  # must not be called
    with pytest.raises(
        EpisodeFailed, match=r"2049 characters is longer than data.max_prompt_length=8 tokens"
    ) as found:
        served.encode([{"role": "user", "content": "x" * 2049}])
    assert found.value.reason == "prompt_too_long"


def sample(served: ServedPolicy, seed: int | None = 7) -> Any:
    return asyncio.run(served.generate("d", [1, 2], seed))


def test_a_prompt_that_is_too_long_fails_the_episode_instead_of_being_cut() -> None:
    served = policy(output([65, 0]))
    assert served.encode([{"role": "user", "content": "12345678"}]) == [ord(char) for char in "12345678"]
    with pytest.raises(EpisodeFailed, match=r"9 tokens.*max_prompt_length=8") as caught:
        served.encode([{"role": "user", "content": "123456789"}])
    assert caught.value.reason == "prompt_too_long"


def test_sampled_ids_are_kept_and_decoded_once() -> None:
    served = policy(output([65, 66, 0]))
    generation = sample(served)
    assert generation.token_ids == [65, 66, 0]
    assert generation.log_probs == [-0.5] * 3
    assert generation.text == "AB"
    assert generation.weights_version == (3, 4)
    assert not generation.truncated


def test_an_answer_says_how_it_came_and_what_the_server_had_of_its_prompt() -> None:
    came = output([65, 0])
    served = policy(came)
    assert (sample(served).resumed, sample(served).cached_tokens) == (0, 0)
    came.extra_fields |= {"resumed": 2, "num_cached_tokens": 1}
    generation = sample(served)
    assert (generation.resumed, generation.cached_tokens) == (2, 1)
    assert served.counts == {"candidates": 3, "prompt_tokens": 6, "cached_prompt_tokens": 1}


def test_truncation_is_a_full_answer_without_an_end() -> None:
    assert sample(policy(output([65, 66, 67, 68]))).truncated
    assert not sample(policy(output([65, 66, 67, 0]))).truncated


def test_seed_and_length_reach_the_server_and_no_seed_is_no_key() -> None:
    served = policy(output([65, 0]))
    sample(served, seed=7)
    sample(served, seed=None)
    assert [params.get("seed") for params in served.client.params] == [7, None]
    assert all(params["max_tokens"] == 4 for params in served.client.params)
    assert "seed" not in served.sampling_params


@pytest.mark.parametrize(
    ("answer", "reason", "timeout"),
    [
        ("never", "timeout", 0.05),
        (output([], stop_reason="aborted"), "engine", HANG),
    ],
)
def test_failures_of_the_engine_fail_the_episode(answer: Any, reason: str, timeout: float) -> None:
    with pytest.raises(EpisodeFailed) as caught:
        sample(policy(answer, request_timeout=timeout))
    assert caught.value.reason == reason


def test_an_answer_that_may_call_tools_ends_where_its_family_ends_calls() -> None:
    """GLM ends a call with a token of its own; without tools that token ends nothing."""

    class Glm(Letters):
        def convert_tokens_to_ids(self, token: str) -> int:
            return {"<|observation|>": 9}[token]

    served = policy(output([65, 66, 67, 9]), chat=Chat(Glm(), format="glm"))
    called = asyncio.run(served.generate("d", [1, 2], 7, ReplyLimits(calls=True)))
    assert served.client.params[0]["stop_token_ids"] == [0, 9]
    assert not called.truncated
    assert sample(served).truncated
    assert "stop_token_ids" not in served.client.params[1]
    plain = policy(output([65, 0]))
    asyncio.run(plain.generate("d", [1, 2], 7, ReplyLimits(calls=True)))
    assert "stop_token_ids" not in plain.client.params[0]


def test_an_agent_answers_with_its_own_settings_and_else_with_the_jobs() -> None:
    class Template(Letters):
        def apply_chat_template(self, messages: list[Any], enable_thinking: bool = True, **_: Any) -> list[int]:
            return [ord(char) for char in f"{enable_thinking:d}" + "|".join(one["content"] for one in messages)]

    answers = SamplingSettings.model_construct(
        temperature=0.5,
        top_p=None,
        top_k=None,
        max_response_length=3,
        stop=["C"],
        chat_template_kwargs={"enable_thinking": False},
        system="sys",
    )
    server, given = Server(output([65, 66, 67])), {"temperature": 1.0, "top_p": 0.9, "top_k": -1}
    others: dict[str, Any] = {
        "client": server,
        "max_prompt_length": 32,
        "max_response_length": 4,
        "request_timeout": HANG,
        "sampling_params": given,
    }
    own, plain = (
        ServedPolicy.of(one, Chat(Template()), **others) for one in (answers, SamplingSettings.model_construct())
    )
    sampled = asyncio.run(own.generate("d", [1], None, ReplyLimits(stop=("D",))))
    assert server.params == [{**given, "temperature": 0.5, "max_tokens": 3, "stop": ["C", "D"], "detokenize": True}]
    # The stop text is among the tokens, which have been sampled, and not in the text.
    assert (sampled.text, sampled.token_ids, sampled.temperature) == ("AB", [65, 66, 67], 0.5)
    # Where an interruption was inside of a stop text, the engine did not see it: what follows is not trained on.
    server.answer = output([65, 67, 66, 66])
    straddled = asyncio.run(own.generate("d", [1], None))
    assert (straddled.text, straddled.token_ids, straddled.log_probs) == ("A", [65, 67], [-0.5, -0.5])
    server.answer = output([65, 66, 67])
    assert sample(plain, None).temperature == 1.0
    assert server.params[2] == {**given, "max_tokens": 4}
    question, told = {"role": "user", "content": "?"}, {"role": "system", "content": "own"}
    assert "".join(map(chr, own.encode([question]))) == "0sys|?"
    assert "".join(map(chr, own.encode([told, question]))) == "0sys\n\nown|?"
    assert "".join(map(chr, plain.encode([told, question]))) == "1own|?"
