"""Data from the model itself: the target writes conversations, also in the user's place.

A row is one conversation, token by token as the target wrote it; nothing is decoded and encoded
again. Files of rows (shards) are written one after the other, each under a temporary name first. A
shard depends only on the options, its number and the shards before it, so a killed run loses the
shard under way and, given again, writes the same files.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mlx_redrafter.decoding.options import SamplingOptions
from mlx_redrafter.errors import FormatError, InputError, RedrafterError
from mlx_redrafter.formats import fingerprints
from mlx_redrafter.generate import eos_tokens
from mlx_redrafter.load import ModelPair
from mlx_redrafter.machine.files import write_error
from mlx_redrafter.training.conversations import LEAST_ROOM, Row, RowWriter, hash_of
from mlx_redrafter.training.corpus import ASSISTANT, PADDING, TEMPLATE, read_corpus
from mlx_redrafter.training.prompts import Prompt

_VERSION = 1  # of what the options mean: another one gives other rows
_RECORD = "data.json"


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
            ("row_length", 2 * LEAST_ROOM),
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

    ``report`` gets the tokens written and wanted, after every step of a batch; the former falls
    where a row is dropped. Raises InputError where the folder holds data of other options, prompts
    or texts, or of another target.
    """
    if options.row_length > pair.context_length:
        raise InputError(
            f"row_length is {options.row_length}, but the model's context has "
            f"{pair.context_length}: make it shorter."
        )
    if not options.tokens and not texts:
        raise InputError("no tokens are wanted and no texts given: ask for some.")
    writer = RowWriter(pair, options, list(dict.fromkeys(prompts)))
    _claim(folder, _record(pair, options, writer.prompts, texts))
    paths: list[Path] = []
    known: set[int] = set()
    done = 0

    def progress(more: int) -> None:
        report(done + more, options.tokens)

    while done < options.tokens:
        path = folder / f"rows-{len(paths):05d}.npz"
        if not path.exists():
            rows = writer.write(len(paths), known, progress)
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
        progress(0)
    return paths + _write_texts(pair, folder, options, texts)


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
            f"{folder} holds data made with other settings ({', '.join(changed)}): name another "
            "folder, or delete this one."
        )


def _save(path: Path, rows: Sequence[Row], row_length: int) -> None:
    ids = np.zeros((len(rows), row_length), dtype=np.int32)
    role = np.full(ids.shape, PADDING, dtype=np.uint8)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = row.ids
        role[index, : len(row.ids)] = row.roles
    temperature = np.array([row.temperature for row in rows], dtype=np.float16)
    opening = np.array([row.opening for row in rows], dtype=np.uint64)

    def write(file: BinaryIO) -> None:
        np.savez_compressed(file, ids=ids, role=role, temp=temperature, opening=opening)

    try:
        _replace(path, write)
    except OSError as error:
        raise _cannot_write(path, error) from None


def _replace(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _cannot_write(path: Path, error: OSError) -> RedrafterError:
    return write_error(error, path.parent)


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
    rows: dict[int, Row] = {}
    step = options.row_length - len(head)
    for begin in range(0, len(ids), step):
        row = Row(len(rows), 0, math.nan, 0, None)
        row.extend(head, [TEMPLATE] * len(head))
        row.extend(ids[begin : begin + step], roles[begin : begin + step])
        row.opening = hash_of(row.ids)
        rows.setdefault(row.opening, row)
    found, size = list(rows.values()), options.rows_per_shard
    paths = []
    for number, first in enumerate(range(0, len(found), size)):
        paths.append(folder / f"text-{number:05d}.npz")
        if not paths[-1].exists():
            _save(paths[-1], found[first : first + size], options.row_length)
    return paths
