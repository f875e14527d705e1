"""The tokenizer out of a GGUF file, against a twin that knows only the rules."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mlx_redrafter.errors import FormatError
from mlx_redrafter.formats import gguf, gguf_tokenizer
from tests.formats import bpe_twin
from tests.formats import gguf_files as files

TEXTS = [
    "Hello world, it's a nice day, isn't it? They'll say we've 'text' in quotes.",
    "3.14159 and 1,000,000 in 2024; x1y22z333 ½ ² Ⅷ ٣٤ 一二三",
    "  two spaces,   three,\ttab\t\ttabs\n\nlines\r\n\r\n  end   ",
    "def f(x):\n    return [i**2 for i in range(10) if i != 3]  # squares\n\n\tpass\n",
    "日本語のテキスト、中文字符。한국어 텍스트",
    "👋🏽 👨‍👩‍👧‍👦 🇫🇷 naïve façade Ünïcödé e\u0301 \u00a0nbsp\u2003em\u3000ideographic",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|im_start|><|im_startx",
    "no\x1cseparators\x1f \x85next\u2028line",
    "",
    " ",
    "\n",
    "a",
    "🤖",
    "ALLCAPS camelCase snake_case kebab-case CONSTANT_NAME https://example.org/a?b=c&d=e%20f",
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> gguf.GGUF:
    return gguf.read(files.write(tmp_path_factory.mktemp("gguf") / "small.gguf"))


@pytest.fixture(scope="module")
def tokenizer(small: gguf.GGUF) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(gguf_tokenizer.contents(small)[0]))


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_the_twin_s(tokenizer: Tokenizer, text: str) -> None:
    expected = bpe_twin.encode(text, files.vocabulary(), files.MERGES, files.SPECIAL)
    found = tokenizer.encode(text).ids
    assert found == expected
    assert tokenizer.decode(found, skip_special_tokens=False) == text


def test_a_byte_that_the_vocabulary_lacks_is_dropped(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\x04b").ids == tokenizer.encode("a").ids + tokenizer.encode("b").ids


def test_digits_stand_alone_and_take_no_space(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hello 42").tokens == ["hello", "Ġ", "4", "2"]


def test_special_ids(small: gguf.GGUF) -> None:
    """All ids that end a text, the file's own first."""
    expected = {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}
    assert gguf_tokenizer.special_ids(small) == expected
    assert gguf_tokenizer.contents(small)[2] == expected


def test_the_end_of_a_turn_ends_a_text(tmp_path: Path) -> None:
    path = files.write(tmp_path / "x.gguf", tokenizer__ggml__eot_token_id=5)
    assert gguf_tokenizer.special_ids(gguf.read(path))["eos_token_id"] == [2, 5, 0]


def test_settings(small: gguf.GGUF) -> None:
    assert gguf_tokenizer.contents(small)[1] == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "additional_special_tokens": files.SPECIAL,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 128,
        "chat_template": files.TEMPLATE,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer__ggml__model": "llama"}, "unknown kind"),
        ({"tokenizer__ggml__pre": "llama-bpe"}, r"unknown kind \(llama-bpe\)"),
        ({"tokenizer__ggml__pre": None}, r"unknown kind \(default\)"),
        ({"tokenizer__ggml__add_bos_token": True}, "adds a first token"),
        ({"tokenizer__ggml__token_type": [1, 2, 3]}, "damaged tokenizer"),
        ({"tokenizer__ggml__merges": ["a b c"]}, "damaged tokenizer"),
        ({"tokenizer__ggml__merges": ["\u0120 \u0120\u0120\u0120"]}, "damaged tokenizer"),
        ({"tokenizer__ggml__eos_token_id": None}, "nothing for tokenizer.ggml.eos_token_id"),
        ({"tokenizer__ggml__bos_token_id": 99999}, "has no token 99999, its bos token"),
        ({"tokenizer__ggml__eos_token_id": 99999}, "has no token 99999, its eos token"),
    ],
)
def test_tokenizers_that_are_not_read(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = files.write(tmp_path / "odd.gguf", **changes)
    with pytest.raises(FormatError, match=message):
        gguf_tokenizer.contents(gguf.read(path))
