"""The key-value rows of one text, kept from one request to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_redrafter.decoding.caches import Cache


class PromptCache:
    """A KV cache and the tokens whose rows it holds.

    A request takes the cache out and puts it back, so that one that dies on the way leaves nothing
    behind that could be wrong: the next one then starts cold.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._cache: Cache | None = None
        self.tokens: list[int] = []

    def take(self, prompt: Sequence[int], make_cache: Callable[[], Cache]) -> tuple[Cache, int]:
        """A cache with the rows of as long a prefix of ``prompt`` as is held, and its length.

        At least one token of the prompt is left to be fed: it gives the hidden state.
        """
        cache, held = self._cache, self.tokens
        self.clear()
        shared = min(_common_prefix(held, prompt), len(prompt) - 1)
        if cache is None or shared < 1 or not _rewind(cache, shared):
            return make_cache(), 0
        return cache, shared

    def put(self, cache: Cache, tokens: Sequence[int], at_rest: bool = True) -> None:
        """Keep ``cache`` for the rows of ``tokens``; what it holds beyond them is forgotten.

        ``at_rest`` is false where the engine was interrupted inside a call: layers may then be
        uneven, and one that does not tell where it ends (a recurrent state) cannot be trusted.
        """
        self.clear()
        if not at_rest and not all(hasattr(layer, "offset") for layer in cache):
            return
        if _rewind(cache, len(tokens)):
            self._cache, self.tokens = cache, list(tokens)


def _rewind(cache: Cache, offset: int) -> bool:
    """False where the cache does not end there afterwards, and so cannot be used."""
    if offset > cache.offset or not cache.rewind(offset):
        return False
    return all(getattr(layer, "offset", offset) == offset for layer in cache)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
