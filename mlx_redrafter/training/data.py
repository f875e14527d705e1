"""Data from the model itself: the target writes conversations, also in the user's place.

A row is one conversation, token by token as the target wrote it; nothing is decoded and encoded
again. Files of rows (shards) are written one after the other, each under a temporary name first. A
shard depends only on the options, its number and the shards before it, so a killed run loses the
shard under way and, given again, writes the same files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.generate import BatchGenerator, StopSequences

from mlx_redrafter.decoding.choose import make_chooser
from mlx_redrafter.decoding.options import SamplingOptions
from mlx_redrafter.decoding.tree import chain_tree
from mlx_redrafter.errors import FormatError, InputError, RedrafterError
from mlx_redrafter.formats import fingerprints
from mlx_redrafter.generate import encode_prompt, eos_tokens
from mlx_redrafter.load import ModelPair
from mlx_redrafter.training.corpus import ASSISTANT, PADDING, TEMPLATE, USER, read_corpus
from mlx_redrafter.training.framing import ChatFrame
from mlx_redrafter.training.prompts import Prompt

_VERSION = 1  # of what the options mean: another one gives other rows
_RECORD = "data.json"
_TRIES = 4  # for a row that turns out empty, known or a loop
_OPENING = 16  # tokens made up as the beginning of a text, where there is no chat template
_LEAST_ROOM = 32  # tokens left in a row that are worth a further turn
_LEAST_ANSWER = 8  # tokens of the assistant that make a row worth keeping
_PREFILL_BATCH = 8
_HALVINGS = 20
_GRAM = 8  # tokens; a text whose tokens complete a sequence of so many that was there before ...
_LOOP_SHARE = 0.75  # ... in so large a share ...
_LOOP_WINDOW = 64  # ... of its last tokens is a loop
_SHORTEST_LOOP = 32


@dataclass(frozen=True)
class DataOptions:
    """What the target writes. ``temperatures`` are those of answers, in equal shares; made-up user
    turns have temperature 1. ``top_p`` cuts all that is sampled, as mlx-lm cuts it; 1 is off."""

    tokens: int = 2_000_000  # of answers, besides texts; another number gives the same first shards
    row_length: int = 512
    rows_per_shard: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.5, 1.0)
    top_p: float = 0.95
    self_prompted: float = 0.5  # share of rows that the target begins, where prompts are given
    max_turns: int = 8  # of the user, in one row
    batch_size: int = 16  # rows written at a time
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("tokens", 0),
            ("row_length", 2 * _LEAST_ROOM),
            ("rows_per_shard", 1),
            ("max_turns", 1),
            ("batch_size", 1),
            ("seed", 0),
        ):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        if not self.temperatures:
            raise InputError("there is no temperature; give one, 0 for greedy.")
        for temperature in self.temperatures:
            SamplingOptions(temperature)
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if not 0 <= self.self_prompted <= 1:
            raise InputError(f"self_prompted is {self.self_prompted}; it must be from 0 to 1.")


def write_data(
    pair: ModelPair,
    folder: Path,
    options: DataOptions,
    prompts: Sequence[Prompt] = (),
    texts: Sequence[str] = (),
    report: Callable[[int, int], None] = lambda done, wanted: None,
) -> list[Path]:
    """Let the target write ``options.tokens`` tokens of answers into ``folder``, and put ``texts``
    there as they are; give the files, the target's own first. What is there already is kept.

    ``report`` gets the tokens written and wanted, after every token of a batch. Raises InputError
    where the folder holds data of other options, prompts or of another target.
    """
    if options.row_length > pair.context_length:
        raise InputError(
            f"row_length is {options.row_length}, but the model's context has "
            f"{pair.context_length}: make it shorter."
        )
    if not options.tokens and not texts:
        raise InputError("no tokens are wanted and no texts given: ask for some.")
    writer = _Writer(pair, options, list(dict.fromkeys(prompts)))
    _claim(folder, _record(pair, options, writer.prompts, texts))
    paths: list[Path] = []
    known: set[int] = set()
    done = 0
    while done < options.tokens:
        path = folder / f"rows-{len(paths):05d}.npz"
        if not path.exists():
            before = done
            rows = writer.write(
                len(paths), known, lambda more, before=before: report(before + more, options.tokens)
            )
            if not rows:
                raise InputError(
                    "the model only repeats itself or what it wrote before: give more prompts, or "
                    "temperatures above 0."
                )
            _save(path, rows, options.row_length)
        written, openings = _read_back(path, pair)
        done += written
        known |= openings
        paths.append(path)
        report(done, options.tokens)
    return paths + _write_texts(pair, folder, options, texts)


# --- rows -----------------------------------------------------------------------------------------


@dataclass
class _Row:
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


class _Writer:
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
            if frame + _LEAST_ROOM > options.row_length:
                raise InputError(
                    f"row_length is {options.row_length}, but the chat template alone takes "
                    f"{frame} tokens: make it at least {frame + _LEAST_ROOM}."
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

    def write(self, shard: int, known: set[int], report: Callable[[int], None]) -> list[_Row]:
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

    def begin(self, shard: int, slot: int, attempt: int, plan: tuple[Prompt | None, int]) -> _Row:
        """A row up to where the target begins to write. A second attempt has another seed, and
        with a given prompt another temperature."""
        prompt, index = plan
        options = self.options
        index = (index + (attempt if prompt else 0)) % len(options.temperatures)
        digest = fingerprints.of_values(options.seed, shard, slot, attempt)
        row = _Row(slot, attempt, options.temperatures[index], int(digest[:16], 16), prompt)
        if prompt is not None:
            row.extend(*self._open(prompt))
            row.opening = _hash(row.ids)
        else:
            row.writing = USER
            head = self._frame.head if self._frame else [self._start_token()]
            row.extend(head, [TEMPLATE] * len(head))
        row.turn_start = len(row.ids)
        return row

    def room(self, row: _Row) -> int:
        """How many tokens the target may write in the turn under way."""
        left = self.options.row_length - len(row.ids)
        if row.writing == ASSISTANT:
            return left
        if self._frame is None:
            return _OPENING
        return (left - len(self._frame.bridge)) // 2

    def stops(self, row: _Row) -> StopSequences:
        return self._answer_stops if row.writing == ASSISTANT else self._user_stops

    def end_user_turn(self, row: _Row, stopped: bool) -> bool:
        """Go on to the answer. True where the cache's rows are still the row's beginning; the
        user's words are then ``row.ids[row.turn_start : ...]`` up to the template's."""
        ending: list[int] = []
        if stopped:
            ending = max((s for s in self._stops if row.ids[-len(s) :] == s), key=len)
            del row.ids[-len(ending) :], row.roles[-len(ending) :]
        bridge = self._frame.bridge if self._frame else []
        row.extend(bridge, [TEMPLATE] * len(bridge))
        row.writing = ASSISTANT
        return bridge[: len(ending)] == ending

    def next_turn(self, row: _Row) -> bool:
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
        if len(row.ids) + used - written + _LEAST_ROOM > self.options.row_length:
            return False
        row.extend(ids[written:], roles[written:])
        row.writing = ASSISTANT if said else USER
        row.turns += 1
        row.turn_start = len(row.ids)
        return True

    def sampler(self, row: _Row) -> Callable[[mx.array], mx.array]:
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
        self, writer: _Writer, shard: int, known: set[int], report: Callable[[int], None]
    ) -> None:
        size = writer.options.batch_size
        self._writer = writer
        self._shard = shard
        self._known = set(known)
        self._report = report
        self._target = writer.pair.target
        self._plan = writer.plan(shard)
        self._waiting = deque((slot, 0) for slot in range(len(self._plan)))
        self._active: dict[int, _Row] = {}
        self._kept: list[_Row] = []
        self._generator = BatchGenerator(
            self._target.model,
            completion_batch_size=size,
            prefill_batch_size=min(size, _PREFILL_BATCH),
        )

    def rows(self) -> list[_Row]:
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

    def _submit(self, row: _Row, new: list[int], cache: list[Any] | None) -> None:
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

    def _end_turn(self, row: _Row, stopped: bool, cache: list[Any]) -> None:
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
            row.opening = _hash(words)
            if blank or row.opening in self._known:
                self._again(row)
                return
            self._known.add(row.opening)
        elif blank:
            self._end(row)
            return
        self._submit(row, row.ids[read:] if as_read else [], cache)

    def _end(self, row: _Row) -> None:
        if len(row.answer) < _LEAST_ANSWER:
            self._again(row)
            return
        if row.given is not None:  # a prompt may be answered again, but not in the same words
            row.opening = _hash([row.opening, *row.answer[:_OPENING]])
            if row.opening in self._known:
                self._again(row)
                return
            self._known.add(row.opening)
        self._kept.append(row)

    def _again(self, row: _Row) -> None:
        if row.attempt + 1 < _TRIES:
            self._waiting.append((row.slot, row.attempt + 1))


def _hash(values: Sequence[int]) -> int:
    digest = hashlib.sha256(np.array(values, dtype=np.uint64).tobytes()).digest()
    return int.from_bytes(digest[:8], "little")


# --- files ----------------------------------------------------------------------------------------


def _record(
    pair: ModelPair, options: DataOptions, prompts: Sequence[Prompt], texts: Sequence[str]
) -> dict[str, Any]:
    """What the rows depend on, as JSON. ``tokens`` only says how many of them there are."""
    weights = fingerprints.of_weights(pair.target.model.parameters())
    template = getattr(pair.tokenizer, "chat_template", None)
    vocabulary = fingerprints.of_vocabulary(pair.tokenizer.get_vocab())
    settings = dataclasses.asdict(options)
    del settings["tokens"]
    record = {
        "version": _VERSION,
        **settings,
        "target": fingerprints.of_values(weights, vocabulary, template, sorted(eos_tokens(pair))),
        "prompts": fingerprints.of_values([dataclasses.astuple(prompt) for prompt in prompts]),
        "num_prompts": len(prompts),
        "texts": fingerprints.of_values(list(texts)),
    }
    decoded: dict[str, Any] = json.loads(json.dumps(record))
    return decoded


def _claim(folder: Path, record: dict[str, Any]) -> None:
    """Write the record into a new folder; raise InputError where another one is there."""
    path = folder / _RECORD
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
        elif any(folder.glob("*.npz")):
            raise InputError(f"{folder} has rows but no {_RECORD}: name another folder.")
        else:
            _replace(path, lambda file: file.write(json.dumps(record, indent=1).encode()))
            return
    except OSError as error:
        raise _cannot_write(path, error) from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise FormatError(f"{path} is broken: name another folder, or delete this one.")
    changed = [name for name in record if found.get(name) != record[name]]
    if changed:
        raise InputError(
            f"{folder} holds data made with another {', '.join(changed)}: name another folder, or "
            "delete this one."
        )


def _save(path: Path, rows: Sequence[_Row], row_length: int) -> None:
    ids = np.zeros((len(rows), row_length), dtype=np.int32)
    role = np.full(ids.shape, PADDING, dtype=np.uint8)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = row.ids
        role[index, : len(row.ids)] = row.roles
    arrays: dict[str, npt.NDArray[Any]] = {
        "ids": ids,
        "role": role,
        "temp": np.array([row.temperature for row in rows], dtype=np.float16),
        "opening": np.array([row.opening for row in rows], dtype=np.uint64),
    }
    try:
        _replace(path, lambda file: np.savez_compressed(file, **arrays))
    except OSError as error:
        raise _cannot_write(path, error) from None


def _replace(path: Path, write: Callable[[Any], Any]) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.part")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _cannot_write(path: Path, error: OSError) -> RedrafterError:
    return RedrafterError(
        f"cannot write {path} ({error.strerror}): free some space, or name another folder."
    )


def _read_back(path: Path, pair: ModelPair) -> tuple[int, set[int]]:
    """How many tokens of answers a shard has, and the hashes of its openings."""
    corpus = read_corpus(path, pair.target.vocab_size)
    with np.load(path, allow_pickle=False) as arrays:
        if "opening" not in arrays:
            raise FormatError(f"{path} was not written here: name another folder.")
        openings = {int(value) for value in arrays["opening"]}
    return int((corpus.role == ASSISTANT).sum()), openings


def _write_texts(
    pair: ModelPair, folder: Path, options: DataOptions, texts: Sequence[str]
) -> list[Path]:
    """Texts one after the other, cut to rows. Between two texts stands an end-of-text token, and
    each row begins with what the tokenizer begins a text with."""
    tokenizer = pair.tokenizer
    start = getattr(tokenizer, "bos_token_id", None)
    head = [] if start is None else [token for token in tokenizer.encode("x")[:1] if token == start]
    ids: list[int] = []
    roles: list[int] = []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in texts:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        ids += [*tokens, *end]
        roles += [ASSISTANT] * len(tokens) + [TEMPLATE] * len(end)
    rows: dict[int, _Row] = {}
    step = options.row_length - len(head)
    for begin in range(0, len(ids), step):
        row = _Row(len(rows), 0, math.nan, 0, None)
        row.extend(head, [TEMPLATE] * len(head))
        row.extend(ids[begin : begin + step], roles[begin : begin + step])
        row.opening = _hash(row.ids)
        rows.setdefault(row.opening, row)
    found, size = list(rows.values()), options.rows_per_shard
    paths = []
    for number, first in enumerate(range(0, len(found), size)):
        paths.append(folder / f"text-{number:05d}.npz")
        if not paths[-1].exists():
            _save(paths[-1], found[first : first + size], options.row_length)
    return paths
