"""Greedy answers to a prompt set, kept with their hidden states, to replay decoding on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator

from mlx_redrafter.benchmarking.prompts import Prompt, chat_tokens
from mlx_redrafter.decoding.loop import Decoder
from mlx_redrafter.decoding.options import DraftOptions
from mlx_redrafter.errors import InputError
from mlx_redrafter.formats import fingerprints
from mlx_redrafter.generate import eos_tokens
from mlx_redrafter.load import ModelPair
from mlx_redrafter.training.acceptance import simulate
from mlx_redrafter.training.corpus import ASSISTANT, TEMPLATE, read_corpus
from mlx_redrafter.training.features import Shard, extract, shards

_REPORT_EVERY = 10  # answers


def write_answers(
    pair: ModelPair,
    prompts: Sequence[Prompt],
    max_tokens: int,
    folder: Path,
    batch: int,
    say: Callable[[str], None],
) -> list[Shard]:
    """One shard of one row for every prompt: its tokens and the target's greedy answer. What is in
    ``folder`` already is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [chat_tokens(pair.tokenizer, prompt.text) for prompt in prompts]
    paths = [folder / f"{_name(pair, text, max_tokens)}.npz" for text in texts]
    missing = [i for i, path in enumerate(paths) if not path.exists()]
    # Prompts of like length share a batch, which is padded to its longest.
    missing.sort(key=lambda i: len(texts[i]))
    done = 0
    for start in range(0, len(missing), batch):
        some = missing[start : start + batch]
        answers = _answer(pair, [texts[i] for i in some], max_tokens)
        for i, answer in zip(some, answers, strict=True):
            role = [TEMPLATE] * len(texts[i]) + [ASSISTANT] * len(answer)
            ids = np.array([texts[i] + answer], dtype=np.int32)
            np.savez(
                paths[i], ids=ids, role=np.array([role], dtype=np.uint8), temp=np.zeros(1, "f2")
            )
        done += len(some)
        say(f"{done} of {len(missing)} answers")
    corpora = [read_corpus(path, pair.target.vocab_size) for path in paths]
    found = shards(corpora, folder)
    extract(pair.target, found, progress=_every(say))
    return found


Count = tuple[int, int]
"""Tokens emitted and steps taken."""


def replay(pair: ModelPair, answers: Sequence[Shard], draft: DraftOptions) -> list[Count]:
    """Decoding steps on each of the answers with the pair's drafter; (0, 0) of one that is too
    short for a step."""
    if pair.drafter is None:
        raise InputError(f"{pair.name} has no drafter: {pair.drafting_reason}.")
    counts = []
    for answer in answers:
        try:
            found = simulate(
                pair.target, pair.drafter, [answer], draft, end_tokens=eos_tokens(pair)
            )
            counts.append((found.overall.tokens, found.overall.steps))
        except InputError:
            counts.append((0, 0))
    return counts


def decode(pair: ModelPair, answer: Shard, draft: DraftOptions, max_tokens: int) -> Count:
    """Real decoding of the same prompt."""
    ends = eos_tokens(pair)
    prompt = answer.corpus.ids[0][answer.corpus.role[0] == TEMPLATE].tolist()
    decoder = Decoder(pair.target, pair.drafter, draft)
    token, tokens, steps = decoder.start(prompt), 0, 0
    while token not in ends and tokens + 1 < max_tokens:
        taken = decoder.step().tokens[: max_tokens - 1 - tokens]
        ended = [i for i, each in enumerate(taken) if each in ends]
        taken = taken[: ended[0] + 1] if ended else taken
        decoder.commit(len(taken))
        tokens, steps, token = tokens + len(taken), steps + 1, taken[-1]
    return tokens, steps


def tokens_per_step(counts: Iterable[Count]) -> float:
    tokens, steps = map(sum, zip(*counts, strict=True))
    return tokens / max(steps, 1)


def _name(pair: ModelPair, text: list[int], max_tokens: int) -> str:
    return fingerprints.of_values(pair.fingerprint, str(pair.target.dtype), text, max_tokens)[:24]


def _answer(pair: ModelPair, texts: list[list[int]], max_tokens: int) -> list[list[int]]:
    generator = BatchGenerator(
        pair.target.model,
        max_tokens=max_tokens,
        stop_tokens=[[token] for token in sorted(eos_tokens(pair))],
        completion_batch_size=len(texts),
        prefill_batch_size=len(texts),
    )
    uids = generator.insert(texts)
    answers: dict[int, list[int]] = {uid: [] for uid in uids}
    running = set(uids)
    try:
        while running:
            for response in generator.next_generated():
                answers[response.uid].append(response.token)
                if response.finish_reason is not None:
                    running.discard(response.uid)
            pair.target.take_hidden()  # nobody reads it here
    finally:
        generator.close()
        mx.clear_cache()
    return [answers[uid] for uid in uids]


def _every(say: Callable[[str], None]) -> Callable[[int, int], None]:
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        if calls % _REPORT_EVERY == 0:
            say(f"hidden states: {done} of {total} tokens")
        calls += 1

    return progress
