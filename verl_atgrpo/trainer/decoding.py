"""The trainer's one tokenizer, for a team whose policies have several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class TeamTokenizer:
    """Decodes every row with the tokenizer of the policy that wrote it.

    verl's trainer decodes the rows of a batch in their order, all prompts and then all responses, with one
    tokenizer. `expect` tells which rows come; `decode` then takes them in that order.
    """

    pad_token_id = -1
    """Padding that is no token of any policy."""

    def __init__(self, tokenizers: Mapping[str, Any]) -> None:
        self._tokenizers = tokenizers
        self._coming: Iterator[str] = iter(())

    def expect(self, tags: Sequence[Mapping[str, Any]]) -> None:
        """Announces a batch by its rows' tags."""
        policies = [str(row["policy"]) for row in tags]
        self._coming = iter(policies + policies)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """Returns the text of the next row announced."""
        tokenizer = self._tokenizers[next(self._coming)]
        ids = [int(token) for token in token_ids if token != self.pad_token_id]
        text: str = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text
