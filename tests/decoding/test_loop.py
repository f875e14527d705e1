"""The loop: the same text as plain decoding, whatever is drafted, wherever a step is cut."""

import ast
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlx_redrafter.decoding import loop
from mlx_redrafter.decoding.loop import Decoder
from mlx_redrafter.decoding.options import DraftOptions, SamplingOptions
from mlx_redrafter.decoding.target import Target
from mlx_redrafter.errors import CompatibilityError, RedrafterError
from tests import reference, tiny_models
from tests.decoding.harness import (
    PROMPT,
    Case,
    case,
    check_lossless,
    make_drafter,
    margins,
    pristine,
    random_drafter,
    run,
    scripted,
    target,
)
from tests.decoding.test_target import unfit
from tests.tiny_models import WINDOW

FOUR = DraftOptions(beam_width=4, beam_length=4, token_budget=9)


# --- one text, any draft --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "length", "budget"),
    [
        *[(2, length, max(1, length)) for length in range(1, 9)],
        (1, 1, 1),
        (1, 5, 5),
        (1, 5, 3),
        (4, 4, 1),
        (4, 4, 2),
        (4, 4, 16),
        (8, 3, 11),
        (3, 8, 24),
    ],
)
def test_scripted_drafts(width: int, length: int, budget: int) -> None:
    draft = DraftOptions(beam_width=width, beam_length=length, token_budget=budget)
    histogram = check_lossless(case(), draft)
    assert set(histogram) <= set(range(min(length, budget) + 1))
    assert len(histogram) > 1, "the script must be right and wrong"


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_families(family: str) -> None:
    assert max(check_lossless(case(family, count=76), FOUR, count=60)) >= 3


@pytest.mark.parametrize("family", ["llama-window", "gemma3_text", "cohere2", "gpt_oss", "olmo3"])
def test_past_three_windows(family: str) -> None:
    """From below the window to beyond three of it, with accepts and rejects all along."""
    decoded = 3 * WINDOW + 24
    histogram = check_lossless(case(family), FOUR, count=decoded)
    assert sum(histogram.values()) > 20
    assert histogram.keys() >= {0, 1, 2}


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_sampled_text_is_the_keyed_plain_text(family: str, temperature: float) -> None:
    """The right text depends on (prompt, seed) alone."""
    known = [case(family, temperature=temperature, seed=seed, count=60) for seed in (3, 4)]
    assert known[0].text != known[1].text
    assert max(check_lossless(known[0], FOUR, count=50)) >= 3
    check_lossless(known[1], FOUR, count=30)


@pytest.mark.parametrize(
    "prompt",
    [(7,), (0,), (0, 0, 0, 0), tuple(range(0, 150, 5)), (3, 0)],
    ids=["one-token", "zero", "zeros", "longer", "ends-with-zero"],
)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_prompts(family: str, prompt: tuple[int, ...]) -> None:
    check_lossless(case(family, prompt=prompt, count=60), FOUR, count=40)


@pytest.mark.parametrize("step_size", [1, 4, 40, 41])
def test_prompt_longer_than_a_prefill_step(step_size: int) -> None:
    prompt = tuple(int(t) for t in np.random.default_rng(2).integers(160, size=41))
    known = case("gemma3_text", prompt=prompt, count=60)
    decoder, _ = scripted(known, FOUR)
    emitted = run(decoder, decoder.start(list(prompt), prefill_step=step_size), 40)
    assert emitted == known.text[: len(emitted)]


@pytest.mark.parametrize("seed", [1, 3, 4])
def test_other_scripts_and_models(seed: int) -> None:
    check_lossless(case(model_seed=seed), FOUR, seed=seed, wrapped=target("llama", seed))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "mixtral"])
def test_quantised(family: str) -> None:
    """4-bit weights: on the CPU a row does not depend on how many there are, so that the text is
    exact.
    """
    assert max(check_lossless(case(family, dtype="4bit", count=76), FOUR, count=60)) >= 3


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
def test_bfloat16_differs_at_ties_only(family: str) -> None:
    known = case(family, dtype="bfloat16")
    decoder, _ = scripted(known, FOUR)
    emitted = run(decoder, decoder.start(list(PROMPT)), 90)[:90]
    margin = margins(pristine(family, dtype="bfloat16"), PROMPT, known.text)
    differ = [i for i, token in enumerate(emitted) if token != known.text[i]]
    noise = np.median(margin) / 4  # bfloat16 has eight bits: a tie is wide
    assert not differ or margin[differ[0]] < noise, f"at {differ[0]}: margin {margin[differ[0]]}"
    assert not differ or differ[0] >= 10


# --- a real drafter -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "width", "length", "budget"),
    [
        ({}, 1, 1, 1),
        ({"rnn": False}, 3, 3, 5),
        ({"exit_dim": 128, "num_draft_layers": 2}, 4, 4, 8),
        ({"num_draft_layers": 0}, 2, 8, 16),
        ({"draft_vocab": 5}, 7, 3, 12),
        ({"draft_vocab": 1}, 2, 2, 4),
        ({}, tiny_models.VOCAB + 3, 2, 9),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_drafters(
    config: dict[str, object], width: int, length: int, budget: int, temperature: float
) -> None:
    known = case(temperature=temperature, seed=1)
    draft = DraftOptions(beam_width=width, beam_length=length, token_budget=budget)
    drafter = random_drafter(target("llama"), **config)
    decoder = Decoder(target("llama"), drafter, draft, known.sampling)
    emitted = run(decoder, decoder.start(list(PROMPT)), 50 if width < 50 else 8)
    assert emitted == known.text[: len(emitted)]


def test_tiny_vocabulary() -> None:
    """Six tokens, eight beams: every continuation is drafted, and one of them is always right."""
    model = tiny_models.build("llama", vocab_size=6)
    expected = reference.decode(tiny_models.build("llama", vocab_size=6), [1, 2, 3], 40)
    wrapped = Target(model)
    draft = DraftOptions(beam_width=8, beam_length=2, token_budget=16)
    decoder = Decoder(wrapped, random_drafter(wrapped), draft, SamplingOptions())
    emitted = [decoder.start([1, 2, 3])]
    while len(emitted) < 30:
        step = decoder.step()
        assert step.num_accepted >= 1
        decoder.commit(len(step.tokens))
        emitted += step.tokens
    assert emitted == expected[: len(emitted)]


# --- plain decoding -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_plain(family: str, temperature: float) -> None:
    known = case(family, temperature=temperature)
    decoder = Decoder(target(family), None, None, known.sampling)
    emitted = [decoder.start(list(PROMPT))]
    while len(emitted) < 90:
        step = decoder.step()
        assert (len(step.tokens), step.num_accepted) == (1, 0)
        decoder.commit(1)
        emitted += step.tokens
        assert decoder.offset == len(PROMPT) + len(emitted) - 1
    assert emitted == known.text[:90]


@pytest.mark.parametrize("drafting", [True, False])
@pytest.mark.parametrize("hint", [1, 2, 7])
def test_max_tokens_is_only_a_hint(drafting: bool, hint: int) -> None:
    known = case()
    if drafting:
        decoder, _ = scripted(known, FOUR)
    else:
        decoder = Decoder(target("llama"), None, None, known.sampling)
    emitted = run(decoder, decoder.start(list(PROMPT), max_tokens=hint), 20)
    assert emitted == known.text[: len(emitted)]
    assert decoder.offset == len(PROMPT) + len(emitted) - 1


# --- one read a step ------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafting", [True, False])
def test_one_host_read_per_step(drafting: bool, temperature: float) -> None:
    known = case(temperature=temperature)
    if drafting:
        decoder, _ = scripted(known, FOUR)
    else:
        decoder = Decoder(target("llama"), None, None, known.sampling)
    decoder.start(list(PROMPT))
    assert decoder.host_reads == 1
    reads = [decoder.host_reads]
    for _ in range(12):
        step = decoder.step()
        decoder.commit(len(step.tokens))
        reads.append(decoder.host_reads)
    assert [after - before for before, after in pairwise(reads)] == [1] * 12


def test_a_cut_step_costs_no_second_read() -> None:
    decoder, _ = scripted(case(), FOUR)
    decoder.start(list(PROMPT))
    before, steps = decoder.host_reads, 0
    while decoder.offset < len(PROMPT) + 40:
        decoder.step()
        decoder.commit(1)
        steps += 1
    assert decoder.host_reads - before == steps


def test_reads_stand_in_one_place() -> None:
    """`.item()` and `.tolist()` wait for the device. In the decode path only `Decoder.read` may."""
    folder = Path(loop.__file__).parent
    load_time = {"drafter.py", "selfcheck.py"}  # run once, before the first token
    found = []
    for path in sorted(folder.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or path.name in load_time:
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and node.attr in ("item", "tolist"):
                    found.append(f"{path.name}:{function.name}")
    assert found == ["loop.py:read"]


# --- cutting a step -------------------------------------------------------------------------------


def long_step(known: Case, draft: DraftOptions) -> tuple[Decoder, list[int], list[int]]:
    """A decoder in the middle of a step with at least three accepted tokens: (decoder, emitted
    before, step tokens).
    """
    decoder, _ = scripted(known, draft)
    emitted = [decoder.start(list(known.prompt))]
    while True:
        step = decoder.step()
        if step.num_accepted >= 3 and len(emitted) > 20:
            return decoder, emitted, step.tokens
        decoder.commit(len(step.tokens))
        emitted += step.tokens


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("family", "temperature"), [("llama", 0.0), ("gemma3_text", 0.0), ("llama", 1.0)]
)
def test_partial_commit_then_continue(family: str, temperature: float, n: int) -> None:
    """As after a stop string or EOS at each place inside an accepted run."""
    known = case(family, temperature=temperature)
    decoder, emitted, tokens = long_step(known, FOUR)
    decoder.commit(n)
    emitted += tokens[:n]
    assert decoder.offset == len(PROMPT) + len(emitted) - 1
    emitted = [*emitted[:-1], *run(decoder, emitted[-1], 30)]
    assert emitted == known.text[: len(emitted)]


def test_every_step_cut_at_random() -> None:
    known = case("llama-window")
    decoder, _ = scripted(known, FOUR)
    rng = np.random.default_rng(0)
    emitted = [decoder.start(list(PROMPT))]
    while len(emitted) < 90:
        step = decoder.step()
        kept = int(rng.integers(1, len(step.tokens) + 1))
        decoder.commit(kept)
        emitted += step.tokens[:kept]
    assert emitted == known.text[: len(emitted)]


@pytest.mark.parametrize("n", [0, -1, 99])
def test_commit_refuses_a_wrong_count(n: int) -> None:
    decoder, _, tokens = long_step(case(), FOUR)
    with pytest.raises((RedrafterError, AssertionError, ValueError)):
        decoder.commit(n if n < 99 else len(tokens) + 1)


# --- resuming -------------------------------------------------------------------------------------


def next_turn(text: list[int], cache: object, family: str, draft: bool = True) -> None:
    """Whatever happened before: a prompt that extends `text` gives, on the old cache, what a cold
    start gives.
    """
    prompt = [*text, 12, 0, 77]
    expected = reference.decode(pristine(family), prompt, 12)
    wrapped = target(family)
    drafter = random_drafter(wrapped) if draft else None
    decoder = Decoder(wrapped, drafter, FOUR if draft else None, SamplingOptions())
    emitted = run(decoder, decoder.start(prompt, cache), 12)  # type: ignore[arg-type]
    assert emitted[:12] == expected
    assert decoder.offset == len(prompt) + len(emitted) - 1


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_turns(family: str, n: int) -> None:
    decoder, emitted, tokens = long_step(case(family), FOUR)
    decoder.commit(n)
    next_turn([*PROMPT, *emitted, *tokens[:n]], decoder.cache, family)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_interrupted_between_step_and_commit(family: str) -> None:
    """Ctrl-C: the step's tokens were never shown. The cache still holds what was committed."""
    decoder, emitted, _ = long_step(case(family), FOUR)
    assert decoder.offset == len(PROMPT) + len(emitted) - 1
    next_turn([*PROMPT, *emitted], decoder.cache, family)


@pytest.mark.parametrize("where", ["verify", "propose", "read"])
def test_interrupted_inside_a_step(where: str) -> None:
    """An exception anywhere inside a step leaves the cache as the last commit left it."""
    decoder, _ = scripted(case(), FOUR)
    emitted = run(decoder, decoder.start(list(PROMPT)), 20)
    with pytest.MonkeyPatch.context() as patch:
        interrupt(decoder, where, patch)
        with pytest.raises(KeyboardInterrupt):
            decoder.step()
    assert decoder.offset == len(PROMPT) + len(emitted) - 1
    next_turn([*PROMPT, *emitted], decoder.cache, "llama")


def interrupt(decoder: Decoder, where: str, patch: pytest.MonkeyPatch) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    patch.setattr(decoder.target if where == "verify" else decoder, where, stop)


def test_resume_where_the_cache_ends() -> None:
    """The prompt is just what was emitted: the last token is not in the cache yet and is fed."""
    known = case()
    decoder, _ = scripted(known, FOUR)
    emitted = run(decoder, decoder.start(list(PROMPT)), 20)
    again, _ = scripted(known, FOUR)
    first = again.start([*PROMPT, *emitted], decoder.cache)
    emitted += run(again, first, 20)
    assert emitted == known.text[: len(emitted)]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_resume_a_fully_cached_prompt(family: str) -> None:
    """No new token: the caller gives one back, since its hidden state is not stored."""
    known = case(family)
    wrapped = target(family)
    cache = wrapped.make_cache()
    wrapped.prefill(mx.array(PROMPT, mx.int32), cache)
    decoder, _ = scripted(known, FOUR)
    with pytest.raises(RedrafterError):
        decoder.start(list(PROMPT), cache)
    assert cache.rewind(len(PROMPT) - 1)
    emitted = run(decoder, decoder.start(list(PROMPT), cache), 30)
    assert emitted == known.text[: len(emitted)]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_rewind_and_answer_again(family: str) -> None:
    """/retry and an edited history: back to a common prefix, then another continuation."""
    known = case(family)
    decoder, _ = scripted(known, FOUR)
    emitted = run(decoder, decoder.start(list(PROMPT)), 60)
    assert decoder.cache.rewind(len(PROMPT) + 40)
    assert decoder.cache.offset == len(PROMPT) + 40
    next_turn([*PROMPT, *emitted[:40]], decoder.cache, family)
    assert decoder.cache.rewind(len(PROMPT))
    next_turn(list(PROMPT), decoder.cache, family)


def test_switching_drafting_on_and_off() -> None:
    """Plain and drafted rounds in turn on one cache, as parking does."""
    known, rng = case(), np.random.default_rng(1)
    emitted: list[int] = []
    cache = target("llama").make_cache()
    while len(emitted) < 80:
        drafting = bool(rng.integers(2))
        decoder = (
            scripted(known, FOUR)[0]
            if drafting
            else Decoder(target("llama"), None, None, known.sampling)
        )
        first = decoder.start([*PROMPT, *emitted], cache)
        emitted += run(decoder, first, int(rng.integers(1, 9)))
        assert emitted == known.text[: len(emitted)]


def test_plain_pipelining_leaves_nothing_behind() -> None:
    """Plain decoding computes ahead. A request dropped at any moment must not show in the cache."""
    decoder = Decoder(target("llama"), None, None, SamplingOptions())
    emitted = run(decoder, decoder.start(list(PROMPT)), 15)
    decoder.step()
    next_turn([*PROMPT, *emitted], decoder.cache, "llama", draft=False)


@pytest.mark.parametrize("kind", ["dynamic", "hybrid", "recurrent"])
def test_plain_only_models_resume_or_refuse(kind: str) -> None:
    """Plain decoding has fed one token ahead. A cache that cannot forget it must say so."""
    model, twin = plain_only(kind), plain_only(kind)
    wrapped = Target(model)
    decoder = Decoder(wrapped, None, None, SamplingOptions())
    emitted = run(decoder, decoder.start(list(PROMPT)), 10)
    prompt = [*PROMPT, *emitted, 12, 0, 77]
    kept = decoder.cache
    if not kept.rewind(kept.offset):
        assert kind != "dynamic"
        kept = wrapped.make_cache()
    again = Decoder(wrapped, None, None, SamplingOptions())
    found = run(again, again.start(prompt, kept), 10)
    cold = make_prompt_cache(twin)
    expected = [
        token
        for token, _ in generate_step(mx.array(prompt), twin, prompt_cache=cold, max_tokens=10)
    ]
    assert found == [int(token) for token in expected]


def plain_only(kind: str) -> nn.Module:
    if kind == "dynamic":
        scaling = {"type": "dynamic", "factor": 2.0}
        return tiny_models.build("llama", rope_scaling=scaling, max_position_embeddings=64)
    return unfit(kind)


def test_a_shorter_prompt_than_the_cache_is_refused() -> None:
    decoder, _ = scripted(case(), FOUR)
    run(decoder, decoder.start(list(PROMPT)), 20)
    with pytest.raises((RedrafterError, AssertionError, ValueError)):
        scripted(case(), FOUR)[0].start([1, 2, 3], decoder.cache)


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(RedrafterError):
        scripted(case(), FOUR)[0].start([])


@pytest.mark.parametrize("token", [-1, tiny_models.VOCAB])
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(RedrafterError):
        Decoder(target("llama"), None, None, SamplingOptions()).start([3, token, 4])


def test_a_cache_of_another_target_is_refused() -> None:
    cache = target("llama", 1).make_cache()
    with pytest.raises((RedrafterError, AssertionError)):
        scripted(case(), FOUR)[0].start([1, 2, 3], cache)


def test_two_requests_in_turn() -> None:
    """Interleaved steps on one target: nothing is shared but the weights."""
    cases = [case(), case(prompt=(7,), count=60)]
    decoders = [scripted(known, FOUR)[0] for known in cases]
    texts = [
        [decoder.start(list(known.prompt))] for known, decoder in zip(cases, decoders, strict=True)
    ]
    for _ in range(12):
        for decoder, text in zip(decoders, texts, strict=True):
            step = decoder.step()
            decoder.commit(len(step.tokens))
            text += step.tokens
    for known, text in zip(cases, texts, strict=True):
        assert text[:50] == known.text[: len(text)][:50]


def test_long_short_long() -> None:
    """Acceptance does not decay over requests: each repeats the histogram of the first."""
    first = check_lossless(case(), FOUR)
    check_lossless(case(prompt=(7,), count=60), FOUR, count=40)
    assert check_lossless(case(), FOUR) == first


def test_in_a_worker_thread() -> None:
    """mlx streams belong to threads; a server generates in a thread that did not load the model."""
    failures: list[BaseException] = []

    def work(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            failures.append(error)

    for family in ("llama", "gemma3_text"):
        known = case(family)
        thread = threading.Thread(
            target=work, args=(partial(check_lossless, known, FOUR, count=40),)
        )
        thread.start()
        thread.join()
    assert not failures, failures


def test_a_drafter_of_another_size_is_refused() -> None:
    wrapped = target("llama")
    drafter = make_drafter(
        {"hidden_size": 32, "vocab_size": tiny_models.VOCAB, "exit_dim": 32, "num_draft_layers": 1}
    )
    with pytest.raises(CompatibilityError, match="another model"):
        Decoder(wrapped, drafter)


def test_a_plain_models_cache_goes_on_where_it_stopped() -> None:
    """The pass that ran ahead has left a row in mlx-lm's own caches."""
    scaling = {"type": "dynamic", "factor": 2.0}
    model = tiny_models.build("llama", rope_scaling=scaling, max_position_embeddings=64)
    wrapped = Target(model)
    assert not wrapped.supports_trees
    whole = Decoder(wrapped)
    text = [5, 9, 3]
    text.append(whole.start(text))
    for _ in range(8):
        text += whole.step().tokens
        whole.commit(1)
    parts = Decoder(wrapped)
    again = [5, 9, 3]
    again.append(parts.start(again))
    for _ in range(3):
        again += parts.step().tokens
        parts.commit(1)
    rest = Decoder(wrapped)
    again.append(rest.start(again, parts.cache))
    while len(again) < len(text):
        again += rest.step().tokens
        rest.commit(1)
    assert again == text
