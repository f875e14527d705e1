"""What a chat template puts around messages, as tokens: found by rendering it, never guessed.

The same conversation is rendered with two contents, "x" and "y", in one place. What the two token
lists share before and after that place is the template's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from mlx_redrafter.errors import InputError
from mlx_redrafter.generate import Message, encode_prompt, eos_tokens
from mlx_redrafter.load import ModelPair
from mlx_redrafter.training.corpus import TEMPLATE, USER

_SENTINELS = ("x", "y")


class ChatFrame:
    """The template's tokens around one user turn and the next.

    head     before the first user message, with the template's own system prompt
    bridge   from the end of a user message to where the assistant begins
    between  from the end of an answer to where the next user message begins; it begins with what
             ends the answer
    """

    def __init__(self, pair: ModelPair) -> None:
        self._pair = pair
        self._opening_frame = lru_cache(maxsize=64)(self._uncached_opening_frame)
        self.head, self.bridge = self._opening_frame(None)
        self.between, _ = _around(self._further)

    def opening(self, content: str, system: str | None) -> tuple[list[int], list[int]]:
        """Tokens and roles of a conversation up to where the assistant begins."""
        head, bridge = self._opening_frame(system)
        ids = self._first(content, system)
        return ids, _roles(ids, head, bridge)

    def further(self, content: str) -> tuple[list[int], list[int]]:
        """Tokens and roles from the end of an answer to where the assistant begins again."""
        ids = self._further(content)
        return ids, _roles(ids, self.between, self.bridge)

    def user_stops(self) -> list[list[int]]:
        """Token sequences that show that a user turn, written by the target, has ended."""
        added = getattr(self._pair.tokenizer, "added_tokens_decoder", {})
        ends = {i for i, token in added.items() if token.special or i in self.bridge}
        ends |= eos_tokens(self._pair)
        stops = [[token] for token in sorted(ends)]
        return stops if ends.intersection(self.bridge) else [*stops, self.bridge]

    def _first(self, content: str, system: str | None = None) -> list[int]:
        user = {"role": "user", "content": content}
        return encode_prompt(self._pair, [user], system_prompt=system)

    def _further(self, content: str) -> list[int]:
        """The end of a conversation whose first answer is a sentinel: all that comes after it."""

        def after(answer: str) -> list[int]:
            messages: list[Message] = [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": answer},
                {"role": "user", "content": content},
            ]
            return encode_prompt(self._pair, messages)

        one, other = (after(answer) for answer in _SENTINELS)
        return one[len(one) - _shared(one[::-1], other[::-1]) :]

    def _uncached_opening_frame(self, system: str | None) -> tuple[list[int], list[int]]:
        return _around(lambda content: self._first(content, system))


def _around(encode: Callable[[str], list[int]]) -> tuple[list[int], list[int]]:
    """The tokens that ``encode`` puts before and after any content."""
    one, other = (encode(content) for content in _SENTINELS)
    before = _shared(one, other)
    after = _shared(one[::-1], other[::-1])
    if before + after >= len(one):
        raise InputError("the model's chat template does not show what the user says.")
    return one[:before], one[len(one) - after :]


def _roles(ids: list[int], before: list[int], after: list[int]) -> list[int]:
    head = _shared(ids, before)
    tail = min(_shared(ids[::-1], after[::-1]), len(ids) - head)
    return [TEMPLATE] * head + [USER] * (len(ids) - head - tail) + [TEMPLATE] * tail


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens the two begin with in common."""
    differ = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))
