"""Conversations that the target holds with itself, many at a time.

The target opens a user turn of its chat template, writes the user's words at temperature 1, then
the answer, then further turns until the row is full. Or it answers given prompts. All of it is one
stream of tokens per row: nothing is decoded and encoded again.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, StopSequences

from mlx_redrafter.decoding.choose import make_chooser
from mlx_redrafter.decoding.options import SamplingOptions
from mlx_redrafter.decoding.tree import chain_tree
from mlx_redrafter.errors import InputError
from mlx_redrafter.formats import fingerprints
from mlx_redrafter.generate import encode_prompt, eos_tokens
from mlx_redrafter.load import ModelPair
from mlx_redrafter.training.corpus import ASSISTANT, TEMPLATE, USER
from mlx_redrafter.training.framing import ChatFrame
from mlx_redrafter.training.prompts import Prompt

if TYPE_CHECKING:
    from mlx_redrafter.training.data import DataOptions

_TRIES = 4  # for a row that turns out empty, known or a loop
_OPENING = 16  # tokens made up as the beginning of a text, where there is no chat template
LEAST_ROOM = 32  # tokens left in a row that are worth a further turn
_LEAST_ANSWER = 8  # tokens of the assistant that make a row worth keeping
_PREFILL_BATCH = 8
_HALVINGS = 20
_GRAM = 8  # tokens; a text whose tokens complete a sequence of so many that was there before ...
_LOOP_SHARE = 0.75  # ... in so large a share ...
_LOOP_WINDOW = 64  # ... of its last tokens is a loop
_SHORTEST_LOOP = 32


@dataclass
class Row:
    """A conversation under way. ``writing``: USER or ASSISTANT, whose turn the target writes."""

    slot: int
    attempt: int
    temperature: float
    seed: int
    given: Prompt | None
    ids: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    writing: int = ASSISTANT
    turns: int = 1  # of the user, that under way included
    turn_start: int = 0  # where that which is being written began
    opening: int = 0  # hash of what makes this row this row
    answer: list[int] = field(default_factory=list)  # all the assistant's tokens
    _seen: set[tuple[int, ...]] = field(default_factory=set)
    _repeats: deque[bool] = field(default_factory=lambda: deque(maxlen=_LOOP_WINDOW))

    def extend(self, ids: Sequence[int], roles: Sequence[int]) -> None:
        self.ids += ids
        self.roles += roles

    def add(self, token: int) -> None:
        """Take a token that the target wrote."""
        self.ids.append(token)
        self.roles.append(self.writing)
        if self.writing == ASSISTANT:
            self.answer.append(token)
            gram = tuple(self.answer[-_GRAM:])
            self._repeats.append(gram in self._seen)
            self._seen.add(gram)

    @property
    def loops(self) -> bool:
        last = len(self._repeats)
        return last >= _SHORTEST_LOOP and sum(self._repeats) >= _LOOP_SHARE * last

    def cut_loop(self) -> None:
        """Drop everything from where the answer begins to say again what it said before."""
        gram_end = len(self.answer) - len(self._repeats) + self._repeats.index(True)
        keep = max(gram_end - _GRAM + 1, 0)
        places = [place for place, role in enumerate(self.roles) if role == ASSISTANT]
        del self.ids[places[keep] :], self.roles[places[keep] :], self.answer[keep:]


class RowWriter:
    """Writes the rows of one shard at a time, ``batch_size`` of them at once."""

    def __init__(self, pair: ModelPair, options: DataOptions, prompts: list[Prompt]) -> None:
        self.pair = pair
        self.options = options
        self._eos = eos_tokens(pair)
        self._answer_stops = StopSequences([[token] for token in sorted(self._eos)])
        self._frame: ChatFrame | None = None
        if pair.tokenizer.has_chat_template:
            self._frame = ChatFrame(pair)
            frame = len(self._frame.head) + len(self._frame.bridge)
            if frame + LEAST_ROOM > options.row_length:
                raise InputError(
                    f"row_length is {options.row_length}, but the chat template alone takes "
                    f"{frame} tokens: make it at least {frame + LEAST_ROOM}."
                )
            self._stops = self._frame.user_stops()
        else:
            self._stops = [[token] for token in sorted(self._eos)]
        self._user_stops = StopSequences(self._stops)
        longest = options.row_length - options.row_length // 4
        self.prompts = [p for p in prompts if len(self._open(p)[0]) <= longest]
        if prompts and not self.prompts:
            raise InputError(
                f"no prompt leaves room for an answer in rows of {options.row_length} tokens: "
                "raise row_length."
            )
        order = np.random.default_rng(options.seed).permutation(len(self.prompts))
        self._order = [self.prompts[i] for i in order]

    def write(self, shard: int, known: set[int], report: Callable[[int], None]) -> list[Row]:
        """The rows of one shard: none that is ``known``, empty or a loop."""
        return _ShardRun(self, shard, known, report).rows()

    def plan(self, shard: int) -> list[tuple[Prompt | None, int]]:
        """For each row of a shard its prompt, None for one of its own, and its temperature's
        index. Shares come out even over the shards, prompts are used one after the other."""
        rows, share = self.options.rows_per_shard, 1 - self.options.self_prompted
        first, end = (
            math.floor(count * share + 0.5) if self.prompts else 0
            for count in (shard * rows, (shard + 1) * rows)
        )
        prompts: list[Prompt | None] = [
            self._order[i % len(self._order)] for i in range(first, end)
        ]
        prompts += [None] * (rows - len(prompts))
        random = np.random.default_rng([self.options.seed, shard])
        places = shard * rows + random.permutation(rows)
        shuffled = (prompts[i] for i in random.permutation(rows))
        return [
            (prompt, int(place) % len(self.options.temperatures))
            for prompt, place in zip(shuffled, places, strict=True)
        ]

    def begin(self, shard: int, slot: int, attempt: int, plan: tuple[Prompt | None, int]) -> Row:
        """A row up to where the target begins to write. A second attempt has another seed, and
        with a given prompt another temperature."""
        prompt, index = plan
        options = self.options
        index = (index + (attempt if prompt else 0)) % len(options.temperatures)
        digest = fingerprints.of_values(options.seed, shard, slot, attempt)
        row = Row(slot, attempt, options.temperatures[index], int(digest[:16], 16), prompt)
        if prompt is not None:
            row.extend(*self._open(prompt))
            row.opening = hash_of(row.ids)
        else:
            row.writing = USER
            head = self._frame.head if self._frame else [self._start_token()]
            row.extend(head, [TEMPLATE] * len(head))
        row.turn_start = len(row.ids)
        return row

    def room(self, row: Row) -> int:
        """How many tokens the target may write in the turn under way."""
        left = self.options.row_length - len(row.ids)
        if row.writing == ASSISTANT:
            return left
        if self._frame is None:
            return _OPENING
        return (left - len(self._frame.bridge)) // 2

    def stops(self, row: Row) -> StopSequences:
        return self._answer_stops if row.writing == ASSISTANT else self._user_stops

    def end_user_turn(self, row: Row, stopped: bool) -> bool:
        """Put the template's bridge to the answer in place of what ended the user's turn. True
        where what the model has read is still how the row begins."""
        ending: list[int] = []
        if stopped:
            ending = max((s for s in self._stops if row.ids[-len(s) :] == s), key=len)
            del row.ids[-len(ending) :], row.roles[-len(ending) :]
        bridge = self._frame.bridge if self._frame else []
        row.extend(bridge, [TEMPLATE] * len(bridge))
        row.writing = ASSISTANT
        return bridge[: len(ending)] == ending

    def next_turn(self, row: Row) -> bool:
        """Open the user's next turn behind an answer; False where the row is at its end.

        An answer that ended otherwise than the template ends one would be followed by a text that
        no conversation has, and so ends the row.
        """
        frame = self._frame
        if frame is None or (row.given and row.given.raw) or row.turns == self.options.max_turns:
            return False
        if row.ids[-1] not in frame.between:
            return False
        written = frame.between.index(row.ids[-1]) + 1
        said = row.given.turns[row.turns : row.turns + 1] if row.given else ()
        if said:
            ids, roles = frame.further(said[0])
            used = len(ids)
        else:
            ids, roles = frame.between, [TEMPLATE] * len(frame.between)
            used = len(ids) + len(frame.bridge)
        if len(row.ids) + used - written + LEAST_ROOM > self.options.row_length:
            return False
        row.extend(ids[written:], roles[written:])
        row.writing = ASSISTANT if said else USER
        row.turns += 1
        row.turn_start = len(row.ids)
        return True

    def sampler(self, row: Row) -> Callable[[mx.array], mx.array]:
        """Draws as decoding does, with noise keyed by the position in the row (design 4.4): what a
        row says does not depend on which rows are written beside it."""
        temperature = 1.0 if row.writing == USER else row.temperature
        choose = make_chooser(SamplingOptions(temperature, row.seed))
        cut = temperature > 0 and self.options.top_p < 1
        positions = itertools.count(len(row.ids))
        alone = chain_tree(mx.array([0]))

        def sample(logprobs: mx.array) -> mx.array:
            if cut:
                logprobs = _cut_tail(logprobs, self.options.top_p)
            return choose(logprobs, alone, next(positions) - 1)

        return sample

    def _open(self, prompt: Prompt) -> tuple[list[int], list[int]]:
        """Tokens and roles of a given prompt up to where the target continues. Where there is no
        chat template, the first user turn is a text to continue."""
        if self._frame is not None and not prompt.raw:
            return self._frame.opening(prompt.turns[0], prompt.system)
        ids = encode_prompt(self.pair, prompt.turns[0], ignore_chat_template=True)
        ids = ids[: self.options.row_length // 2]
        return ids, [USER] * len(ids)

    def _start_token(self) -> int:
        """What a text of its own begins with."""
        token = getattr(self.pair.tokenizer, "bos_token_id", None)
        if token is None and not self._eos:
            raise InputError("the tokenizer has no token that begins a text: give prompts.")
        return min(self._eos) if token is None else int(token)


@mx.compile
def _cut_tail(logprobs: mx.array, top_p: float) -> mx.array:
    """Keep the likeliest tokens that together reach ``top_p``, as mlx-lm's ``apply_top_p`` does,
    but by halving the range of the threshold: no sort, which takes three times as long on a CPU."""
    probabilities = mx.exp(logprobs.astype(mx.float32))
    low, high = mx.array(0.0), probabilities.max(axis=-1, keepdims=True)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        kept = mx.where(probabilities >= middle, probabilities, 0.0).sum(axis=-1, keepdims=True)
        low, high = mx.where(kept >= top_p, middle, low), mx.where(kept >= top_p, high, middle)
    return mx.where(probabilities < low, -mx.inf, logprobs)


class _ShardRun:
    """Continuous batching: as one row ends a turn or itself, it or the next one goes in."""

    def __init__(
        self, writer: RowWriter, shard: int, known: set[int], report: Callable[[int], None]
    ) -> None:
        size = writer.options.batch_size
        self._writer = writer
        self._shard = shard
        self._known = set(known)
        self._report = report
        self._target = writer.pair.target
        self._plan = writer.plan(shard)
        self._waiting = deque((slot, 0) for slot in range(len(self._plan)))
        self._active: dict[int, Row] = {}
        self._kept: list[Row] = []
        self._generator = BatchGenerator(
            self._target.model,
            completion_batch_size=size,
            prefill_batch_size=min(size, _PREFILL_BATCH),
        )

    def rows(self) -> list[Row]:
        try:
            while self._waiting or self._active:
                while self._waiting and len(self._active) < self._writer.options.batch_size:
                    slot, attempt = self._waiting.popleft()
                    row = self._writer.begin(self._shard, slot, attempt, self._plan[slot])
                    self._submit(row, row.ids, None)
                responses = self._generator.next_generated()
                self._target.take_hidden()  # nobody reads it here: let go of the memory
                for response in responses:
                    self._take(response)
                running = (*self._kept, *self._active.values())
                self._report(sum(len(row.answer) for row in running))
        finally:
            self._generator.close()
            self._target.take_hidden()
            mx.clear_cache()
        return sorted(self._kept, key=lambda row: row.slot)

    def _submit(self, row: Row, new: list[int], cache: list[Any] | None) -> None:
        """Let the target read ``new``, which follows what is in ``cache``, and write on."""
        if not new:  # it must read something: let it read the whole row again
            new, cache = row.ids, None
        (uid,) = self._generator.insert(
            [list(new)],
            [self._writer.room(row)],
            caches=None if cache is None else [cache],
            samplers=[self._writer.sampler(row)],
            stop_sequences=[self._writer.stops(row)],
        )
        self._active[uid] = row

    def _take(self, response: Any) -> None:
        row = self._active[response.uid]
        row.add(response.token)
        if row.loops:
            self._generator.remove([response.uid])
            del self._active[response.uid]
            row.cut_loop()
            self._end(row)
        elif response.finish_reason is not None:
            del self._active[response.uid]
            self._end_turn(row, response.finish_reason == "stop", response.prompt_cache)

    def _end_turn(self, row: Row, stopped: bool, cache: list[Any]) -> None:
        read = len(row.ids)  # the cache holds all that was written, the last token included
        if row.writing == ASSISTANT:
            if stopped and self._writer.next_turn(row):
                self._submit(row, row.ids[read:], cache)
            else:
                self._end(row)
            return
        first = row.given is None and row.turns == 1
        begins = row.turn_start
        as_read = self._writer.end_user_turn(row, stopped)
        words = [i for i, r in zip(row.ids[begins:], row.roles[begins:], strict=True) if r == USER]
        blank = not self._writer.pair.tokenizer.decode(words).strip()
        if first:
            row.opening = hash_of(words)
            if blank or row.opening in self._known:
                self._again(row)
                return
            self._known.add(row.opening)
        elif blank:
            self._end(row)
            return
        self._submit(row, row.ids[read:] if as_read else [], cache)

    def _end(self, row: Row) -> None:
        if len(row.answer) < _LEAST_ANSWER:
            self._again(row)
            return
        if row.given is not None:  # a prompt may be answered again, but not in the same words
            row.opening = hash_of([row.opening, *row.answer[:_OPENING]])
            if row.opening in self._known:
                self._again(row)
                return
            self._known.add(row.opening)
        self._kept.append(row)

    def _again(self, row: Row) -> None:
        if row.attempt + 1 < _TRIES:
            self._waiting.append((row.slot, row.attempt + 1))


def hash_of(values: Sequence[int]) -> int:
    digest = hashlib.sha256(np.array(values, dtype=np.uint64).tobytes()).digest()
    return int.from_bytes(digest[:8], "little")
