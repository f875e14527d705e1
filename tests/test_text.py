"""Streaming text: the stream is what the tokenizer decodes, and stop strings cut it exactly."""

import itertools
import random
import time

import pytest

from mlx_redrafter.text import Detokenizer, StopStrings, Transcript
from tests.fakes import byte_level, sentencepiece, wordpiece

TEXTS = {
    "english": "hello there, how are you? the quick brown fox",
    "leading space": " the lazy dog",
    "only spaces": "   ",
    "newlines": "a\n\n  b\r\n\tc\n",
    "cjk": "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8",
    "zwj emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467 ok",
    "skin tone": "\U0001f937\U0001f3fd\u200d\u2642\ufe0f!",
    "flags": "\U0001f1e9\U0001f1ea\U0001f1ef\U0001f1f5!",
    "combining": "e\u0301a\u0308 n\u0303 \u0915\u094d\u0937\u093f",
    "hebrew": "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "real replacement character": "a\ufffdb\ufffd",
    "nul and controls": "a\x00b\x01",
    "spaces before punctuation": "a , b . c ' d n't",
}
TOKENIZERS = {"byte-level": byte_level, "sentencepiece": sentencepiece}


@pytest.fixture(scope="module")
def tokenizers():
    return {name: make() for name, make in TOKENIZERS.items()} | {"wordpiece": wordpiece()}


def stream(tokenizer, tokens):
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.add(token) for token in tokens]
    return [*parts, detokenizer.tail()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", TEXTS)
def test_the_stream_is_the_decoded_whole(tokenizers, kind, name):
    tokenizer, text = tokenizers[kind], TEXTS[name]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    parts = stream(tokenizer, tokens)
    assert "".join(parts) == tokenizer.decode(tokens)
    if kind == "byte-level":
        assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_prefix_of_a_stream_is_certain(tokenizers, kind):
    """What was given out stays true whatever comes next: it begins every later whole."""
    tokenizer = tokenizers[kind]
    tokens = tokenizer.encode(" ".join(TEXTS.values()), add_special_tokens=False)
    detokenizer, given = Detokenizer(tokenizer), ""
    for count, token in enumerate(tokens, 1):
        given += detokenizer.add(token)
        assert given + detokenizer.tail() == tokenizer.decode(tokens[:count])


@pytest.mark.parametrize("kind", [*TOKENIZERS, "wordpiece"])
def test_random_tokens_stream_as_they_decode(tokenizers, kind):
    """Random ids are mostly broken UTF-8, spaces in odd places and special tokens."""
    tokenizer = tokenizers[kind]
    rng = random.Random(0)
    for _ in range(150):
        tokens = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 60))]
        whole = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        assert "".join(stream(tokenizer, tokens)) == whole


def test_text_comes_as_soon_as_its_characters_are_whole(tokenizers):
    tokenizer = tokenizers["byte-level"]
    tokens = tokenizer.encode("ab\U0001f600c", add_special_tokens=False)
    assert stream(tokenizer, tokens) == ["a", "b", "", "", "", "\U0001f600", "c", ""]


def test_a_stream_that_ends_in_the_middle_of_a_character_is_told(tokenizers):
    tokenizer = tokenizers["byte-level"]
    tokens = tokenizer.encode("ab\U0001f600", add_special_tokens=False)[:-1]
    assert stream(tokenizer, tokens)[-1] == "\ufffd"


@pytest.mark.parametrize("text", ["the quick brown fox ", "\U0001f600", "\u4f60\u597d", "\xff"])
def test_streaming_is_linear(tokenizers, text):
    """A window decodes each token a bounded number of times; broken bytes included."""
    tokenizer = tokenizers["byte-level"]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if text == "\xff":  # one byte that is never valid, as a token
        tokens = tokenizer.convert_tokens_to_ids(["\u00ff"])
    decoded = 0

    class Counting:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def decode(self, ids, **options):
            nonlocal decoded
            decoded += len(ids)
            return tokenizer.decode(ids, **options)

    tokens = (tokens * 2000)[:2000]
    stream(Counting(), tokens)
    assert decoded < 40 * len(tokens)


def test_a_text_that_depends_on_all_before_it_is_never_cut_off_from_it():
    class Parity:
        """Writes in capitals after an odd number of tokens."""

        def decode(self, tokens, **_):
            return "".join(chr(t).upper() if i % 2 else chr(t) for i, t in enumerate(tokens))

        def convert_tokens_to_ids(self, names):
            return [None] * len(names)

    for length in (15, 16, 17, 18, 40):
        tokens = [ord("a") + i % 26 for i in range(length)]
        assert "".join(stream(Parity(), tokens)) == Parity().decode(tokens)

    class Growing(Parity):
        def decode(self, tokens, **_):
            return "".join(f"{i}{chr(t)}" for i, t in enumerate(tokens))

    assert "".join(stream(Growing(), tokens)) == Growing().decode(tokens)


def test_mlx_lms_detokenizer_is_not_used_for_a_reason(tokenizers):
    """It drops the leading space; if this fails, mlx-lm was mended and could be used again."""
    tokenizer = tokenizers["byte-level"]
    tokens = tokenizer.encode(" the", add_special_tokens=False)
    theirs = tokenizer.detokenizer
    for token in tokens:
        theirs.add_token(token)
    theirs.finalize()
    assert theirs.text == "the"
    assert tokenizer.decode(tokens) == " the" == "".join(stream(tokenizer, tokens))


# --- stop strings


def slow_cut(text, stops):
    """The first character at which a stop string is complete; the longest one that ends there."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end - max(lengths)
    return None


def test_stop_strings_agree_with_the_slow_twin():
    rng = random.Random(1)
    found = 0
    for _ in range(3000):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(12)))
        stops = [
            "".join(rng.choice("ab") for _ in range(rng.randrange(1, 5)))
            for _ in range(rng.randrange(1, 4))
        ]
        finder, cut = StopStrings(stops), None
        for index, character in enumerate(text):
            cut = finder.feed(character)
            if cut is not None:
                break
            longest = max(
                (
                    k
                    for k in range(index + 2)
                    for s in stops
                    if s[:k] == text[index + 1 - k : index + 1]
                ),
                default=0,
            )
            assert finder.pending == longest
        assert cut == slow_cut(text, stops)
        assert StopStrings(stops).feed(text) == cut
        found += cut is not None
    assert found > 500


def test_peek_reads_nothing():
    finder = StopStrings(["abc"])
    assert finder.feed("ab") is None
    assert finder.peek("c") == 0
    assert finder.peek("x") is None
    assert finder.pending == 2
    assert finder.feed("c") == 0


def transcribe(tokenizer, tokens, stops):
    """The parts given out after each token, and how many tokens were read."""
    transcript, parts, count = Transcript(tokenizer, stops), [], 0
    for token in tokens:
        count += 1
        if transcript.add(token, drafted=False):
            break
        parts.append("".join(piece.text for piece in transcript.take()))
    parts.append("".join(piece.text for piece in transcript.finish()))
    return parts, count


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_is_cut_exactly_before_the_stop_string(tokenizers, kind):
    tokenizer = tokenizers[kind]
    text = "the fox \U0001f600\U0001f601 the end\u4f60\u597d. the fox"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(tokens)
    for start, length in itertools.product(range(len(whole)), (1, 2, 3, 5, 8)):
        stop = whole[start : start + length]
        parts, count = transcribe(tokenizer, tokens, [stop])
        assert "".join(parts) == whole[: whole.index(stop)]
        # It is seen with the very token that completes it.
        assert stop in tokenizer.decode(tokens[:count])
        assert stop not in tokenizer.decode(tokens[: count - 1])


def test_text_is_held_back_only_as_long_as_it_could_be_a_stop_string(tokenizers):
    tokenizer = tokenizers["byte-level"]
    tokens = [tokenizer.convert_tokens_to_ids(c) for c in "axybxyz"]
    assert transcribe(tokenizer, tokens, ["xyz"]) == (["a", "", "", "xyb", "", "", ""], 7)
    assert transcribe(tokenizer, tokens[:-1], ["xyz"]) == (["a", "", "", "xyb", "", "", "xy"], 6)


def test_held_text_keeps_its_origin(tokenizers):
    tokenizer = tokenizers["byte-level"]
    transcript = Transcript(tokenizer, ["xyz"])
    for character, drafted in zip("axyb", (False, True, False, True), strict=True):
        transcript.add(tokenizer.convert_tokens_to_ids(character), drafted)
    pieces = [(piece.text, piece.drafted) for piece in transcript.take()]
    assert pieces == [("a", False), ("x", True), ("y", False), ("b", True)]


def test_many_and_long_stop_strings_are_not_slow(tokenizers):
    tokenizer = tokenizers["byte-level"]
    tokens = [tokenizer.convert_tokens_to_ids("a")] * 3000
    began = time.process_time()
    parts, _ = transcribe(tokenizer, tokens, ["a" * 5000, "a" * 4000 + "b", "b"])
    assert "".join(parts) == "a" * 3000
    assert time.process_time() - began < 3
