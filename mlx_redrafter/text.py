"""Tokens to text as they come, and where a stop string cuts it.

Nothing here knows the engine. Every part is linear in the length of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Gives out the text of a growing list of tokens, each part once it cannot change any more.

    What is given out, and ``tail()`` after it, is ``tokenizer.decode(all tokens)``: the leading
    space included, characters never broken. (mlx-lm's byte-level detokenizer drops that space, and
    a special token's text goes through its byte table.) Only the "clean-up" that some old
    tokenizers ask for is left out, as in mlx-lm: it joins "a , b" to "a, b" after the fact.

    Only a window of the last tokens is decoded again for each token: its text must end as the text
    of the longer window did, so nothing before it matters.
    """

    KEEP = 8  # tokens that stay when the window moves; an unfinished character has at most four

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = 0  # characters of the window's text that were given out
        self._byte_tokens = byte_tokens(tokenizer)

    def add(self, token: int) -> str:
        """The text that ``token`` makes certain; often none in the middle of a character."""
        self._window.append(token)
        if token in self._byte_tokens:
            return ""  # one wrong byte turns a whole run of them into replacement characters
        text = self._decode(self._window)
        unfinished = len(text) - len(text.rstrip(REPLACEMENT))
        certain = len(text) - min(unfinished, 4)
        new = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        self._move_window(text)
        return new

    def tail(self) -> str:
        """What would follow if the answer ended here."""
        return self._decode(self._window)[self._shown :]

    def _move_window(self, text: str) -> None:
        if len(self._window) < 2 * self.KEEP:
            return
        last = self._window[-self.KEEP :]
        suffix = self._decode(last)
        unseen = len(text) - self._shown
        # Inside a character, or where a first token is written differently, the window would not
        # fit; one of the next tokens offers a better place.
        if text.endswith(suffix) and unseen <= len(suffix):
            self._window = last
            self._shown = len(suffix) - unseen

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return text


def byte_tokens(tokenizer: Any) -> frozenset[int]:
    """The ids of the fallback tokens <0x00> to <0xFF>; empty for a byte-level tokenizer."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = tokenizer.convert_tokens_to_ids(names)
    known = [(i, name) for i, name in zip(ids, names, strict=True) if i is not None]
    if not known:
        return frozenset()
    back = tokenizer.convert_ids_to_tokens([i for i, _ in known])
    pairs = zip(known, back, strict=True)
    return frozenset(i for (i, name), token in pairs if token == name)


class StopStrings:
    """Finds the stop string that is complete first, whatever way the text is cut into parts."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = list(dict.fromkeys(stops))
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._seen = 0

    def feed(self, text: str) -> int | None:
        """Read on. The position in all text read at which a complete stop string begins, or None.

        The longest wins where several end at the same character.
        """
        for character in text:
            self._seen += 1
            found = 0
            for index, (stop, fallback) in enumerate(
                zip(self._stops, self._fallbacks, strict=True)
            ):
                matched = self._matched[index]
                while matched and stop[matched] != character:
                    matched = fallback[matched]
                matched += stop[matched] == character
                if matched == len(stop):
                    found = max(found, matched)
                    matched = fallback[matched]
                self._matched[index] = matched
            if found:
                return self._seen - found
        return None

    def peek(self, text: str) -> int | None:
        """``feed``, without reading on."""
        saved = self._matched.copy(), self._seen
        found = self.feed(text)
        self._matched, self._seen = saved
        return found

    @property
    def pending(self) -> int:
        """Length of the end of the text read that may still become a stop string."""
        return max(self._matched, default=0)

    def __bool__(self) -> bool:
        return bool(self._stops)


def _fallbacks(stop: str) -> list[int]:
    """Entry i: length of the longest proper prefix of ``stop`` that ``stop[:i]`` ends with.

    For "aab": [0, 0, 1, 0]. (Knuth, Morris and Pratt.)
    """
    table = [0, 0]
    for end in range(1, len(stop)):
        matched = table[end]
        while matched and stop[matched] != stop[end]:
            matched = table[matched]
        table.append(matched + (stop[matched] == stop[end]))
    return table


@dataclass(frozen=True)
class Piece:
    """A part of the answer's text; ``drafted`` where it came with an accepted draft token."""

    text: str
    drafted: bool


class Transcript:
    """The text of one answer: detokenized, held back where a stop string may begin, cut at one."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._held: list[Piece] = []
        self._given = 0  # characters given out
        self._drafted = False  # whether the last token was
        self._cut: int | None = None

    def add(self, token: int, drafted: bool) -> bool:
        """Take one token. True if it completes a stop string; the text then ends before that."""
        self._drafted = drafted
        new = self._detokenizer.add(token)
        self._hold(new)
        self._cut = self._stops.feed(new)
        if self._cut is None and self._stops:
            # A character or run of bytes that may still change is what it is if we stop here.
            self._cut = self._stops.peek(self._detokenizer.tail())
        return self._cut is not None

    def take(self) -> list[Piece]:
        """The text that is certain to belong to the answer and was not yet given out."""
        held = sum(len(piece.text) for piece in self._held)
        return self._release(held - self._stops.pending)

    def finish(self, whole: bool = True) -> list[Piece]:
        """All text not yet given out, at the end of the answer or before its stop string.

        Unless ``whole``, a character that its tokens did not finish is left out.
        """
        tail = self._detokenizer.tail()
        self._hold(tail if whole else tail.rstrip(REPLACEMENT))
        held = sum(len(piece.text) for piece in self._held)
        return self._release(held if self._cut is None else self._cut - self._given)

    def _hold(self, text: str) -> None:
        if text:
            self._held.append(Piece(text, self._drafted))

    def _release(self, count: int) -> list[Piece]:
        self._given += count
        pieces: list[Piece] = []
        while count > 0:
            piece = self._held.pop(0)
            if len(piece.text) > count:
                self._held.insert(0, Piece(piece.text[count:], piece.drafted))
                piece = Piece(piece.text[:count], piece.drafted)
            pieces.append(piece)
            count -= len(piece.text)
        return pieces
