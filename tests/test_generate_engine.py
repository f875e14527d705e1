"""Streaming on the real engine: an answer can stop anywhere, and the next one goes on from there.

Tiny models with a scripted draft, so that steps accept several tokens. Warm must equal cold: what
follows any part of the known text is the rest of it, whatever the cache went through before.
"""

import random
import sys

import pytest

from mlx_redrafter.decoding.loop import Decoder
from mlx_redrafter.decoding.options import DraftOptions
from mlx_redrafter.generate import PromptCache, stream_generate
from tests.decoding import harness
from tests.fakes import byte_level, fake_pair

SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("gemma3_text", "qwen3")]
FAMILIES = ("llama", "llama-window", *SLOW)
DRAFT = DraftOptions(beam_width=3, beam_length=4, token_budget=9)
LENGTH = 60


@pytest.fixture
def ask(monkeypatch):
    """`ask(case, prompt, cache, drafting=True, ...)` streams on a decoder that knows the text."""
    tokenizer = byte_level()
    tokenizer.eos_token_ids = []
    made = []

    def decoder(request):
        case = request.pair.case
        if request.draft is None:
            made.append(Decoder(request.pair.target, None, None, case.sampling))
        else:
            made.append(harness.scripted(case, request.draft, wrapped=request.pair.target)[0])
        return made[-1]

    monkeypatch.setattr(sys.modules["mlx_redrafter.generate"], "_decoder", decoder)

    def ask(case, prompt, cache, drafting=True, **options):
        pair = fake_pair(tokenizer, target=harness.target(case.family))
        pair.case = case
        draft = DRAFT if drafting else None
        return stream_generate(pair, prompt, cache=cache, draft=draft, **options)

    ask.made = made
    return ask


def tokens_of(segments):
    return [token for segment in segments for token in segment.tokens]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafting", [True, False])
def test_a_limit_anywhere_leaves_a_cache_to_go_on_from(ask, family, drafting):
    case, rng = harness.case(family), random.Random(0)
    prompt, cache, place = list(case.prompt), PromptCache(), 0
    accepted = 0
    while place < LENGTH:
        count = rng.randrange(1, 8)
        sequence = prompt + case.text[:place]
        segments = list(ask(case, sequence, cache, drafting, max_tokens=count))
        assert tokens_of(segments) == case.text[place : place + count]
        assert cache.tokens == sequence + case.text[place : place + count - 1]
        accepted += segments[-1].stats.accepted
        if place:
            assert segments[-1].stats.cached_tokens == len(sequence) - 1
        place += count
    assert accepted > 10 or not drafting


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafting", [True, False])
def test_warm_equals_cold_after_going_back(ask, family, drafting):
    """Requests in any order: longer, shorter, abandoned after any number of steps."""
    case, rng = harness.case(family), random.Random(1)
    cache, reused = PromptCache(), 0
    for _ in range(25):
        place = rng.randrange(LENGTH)
        sequence = list(case.prompt) + case.text[:place]
        stream = ask(case, sequence, cache, drafting, max_tokens=rng.randrange(1, 20))
        wanted, got = rng.randrange(1, 6), []
        for segment in stream:
            got += segment.tokens
            wanted -= 1
            if not wanted:
                break
        stream.close()
        assert got == case.text[place : place + len(got)]
        assert cache.tokens == sequence + got[:-1]
        reused += cache.tokens != []
    assert reused == 25


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafting", [True, False])
def test_an_interrupt_inside_a_layer_is_mended(monkeypatch, ask, family, drafting):
    """Ctrl-C between two layers of a forward pass, or of a compaction, leaves them uneven."""
    case, rng = harness.case(family), random.Random(2)
    cache, warm = PromptCache(), 0
    layer = type(harness.target(family).make_cache()[-1])
    for name in ("update_and_fetch", "compact"):
        for _ in range(8):
            left = rng.randrange(1, 12)
            genuine = getattr(layer, name)

            def broken(self, *args, genuine=genuine):
                nonlocal left
                left -= 1
                if not left:
                    raise KeyboardInterrupt
                return genuine(self, *args)

            place = rng.randrange(LENGTH)
            sequence, got = list(case.prompt) + case.text[:place], []
            with monkeypatch.context() as patch:
                patch.setattr(layer, name, broken)
                try:
                    for segment in ask(case, sequence, cache, drafting, max_tokens=20):
                        got += segment.tokens
                except KeyboardInterrupt:
                    assert not left
            whole = sequence + got
            assert cache.tokens == whole[: len(cache.tokens)]
            warm += bool(cache.tokens)
            place += len(got)
            rest = ask(case, whole, cache, drafting, max_tokens=5)
            assert tokens_of(rest) == case.text[place : place + 5]
    assert warm > 8


@pytest.mark.parametrize("drafting", [True, False])
def test_a_stop_string_in_a_run_leaves_a_cache_to_go_on_from(ask, drafting):
    case, cache = harness.case("llama"), PromptCache()
    tokenizer = byte_level()
    for place in range(12):
        sequence = list(case.prompt) + case.text[:place]
        stop = tokenizer.decode(case.text[place + 3 : place + 5])
        if not stop or "\ufffd" in stop:
            continue
        text = "".join(s.text for s in ask(case, sequence, cache, drafting, stop=stop))
        whole = tokenizer.decode(case.text[place : place + 20])
        assert text == whole[: whole.index(stop)]
        sequence = cache.tokens
        known = list(case.prompt) + case.text
        assert sequence == known[: len(sequence)]
        rest = ask(case, known[: len(sequence) + 1], cache, drafting, max_tokens=4)
        start = len(sequence) + 1 - len(case.prompt)
        assert tokens_of(rest) == case.text[start : start + 4]
