"""A model pair without a model: real (tiny) tokenizers and an engine that plays a script.

The engine keeps the contract of `decoding.loop.Decoder` and checks that its caller does: one commit
a step, of one to all of its tokens. Its cache is the list of tokens whose rows it would hold, so
that every test can look.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from mlx_redrafter import generate as generate_module  # noqa: F401  (kept a function by the package)
from mlx_redrafter.decoding.loop import Step

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ prefix or '' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello there, how are you?",
    "user system assistant",
]


def byte_level(template: str | None = CHATML, extra: Sequence[str] = ()) -> TokenizerWrapper:
    """A byte-level BPE with few merges: whatever is not plain English falls into single bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in extra])
    return _wrap(tokenizer, template, "<|im_end|>", BPEStreamingDetokenizer)


def sentencepiece(template: str | None = None) -> TokenizerWrapper:
    """Llama 2's kind: a space before the first word, <0x..> tokens for what it does not know."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    letters = list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?'")
    pairs = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("\u2581", "a")]
    names += letters + ["".join(pair) for pair in pairs]
    model = models.BPE(
        {name: i for i, name in enumerate(names)}, pairs, unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    strip = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(strip)
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in ("<s>", "</s>")]
    )
    return _wrap(tokenizer, template, "</s>")


def wordpiece() -> TokenizerWrapper:
    """A kind whose decoder writes a token differently at the start."""
    words = ["[UNK]", "</s>", "the", "quick", "fox", "##es", "n", "'", "##t", "ve", ",", "?"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _wrap(tokenizer, None, "</s>", clean_up_tokenization_spaces=True)


def _wrap(
    tokenizer: Tokenizer, template: str | None, eos: str, detokenizer: Any = None, **kwargs: Any
) -> TokenizerWrapper:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, **kwargs)
    fast.chat_template = template
    return TokenizerWrapper(fast, *([detokenizer] if detokenizer else []))


class FakeCache(list[Any]):
    """No layers; `rows` are the tokens that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.unsettled: list[int] = []  # written by a step that was not committed
        self.can_rewind = True

    @property
    def offset(self) -> int:
        return len(self.rows)

    def rewind(self, offset: int) -> bool:
        assert offset <= len(self.rows)
        del self.rows[offset:]
        self.unsettled.clear()
        return self.can_rewind


@dataclass
class Script:
    """What the engine says: the first token, then `steps` of (tokens, how many were drafted).

    `before` is called at each call of the engine with its name, to raise from in there.
    """

    first: int
    steps: list[tuple[list[int], int]]
    before: Callable[[str], None] = lambda name: None
    decoders: list["FakeDecoder"] = field(default_factory=list)


def script(tokens: Sequence[int], sizes: Sequence[int]) -> Script:
    """`tokens` cut into the first and steps of `sizes` tokens (the last size repeats)."""
    rest, steps, sizes = list(tokens[1:]), [], list(sizes)
    while rest:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        steps.append((rest[:size], len(rest[:size]) - 1))
        rest = rest[size:]
    return Script(tokens[0], steps)


class FakeDecoder:
    def __init__(self, played: Script) -> None:
        self.script = played
        self.steps = list(played.steps)
        self.commits: list[int] = []
        self.pending: list[int] | None = None
        self.cache: FakeCache | None = None

    @property
    def offset(self) -> int:
        assert self.cache is not None
        return self.cache.offset

    def start(
        self, prompt: list[int], cache: FakeCache | None = None, *, max_tokens: int | None = None
    ) -> int:
        self.cache = FakeCache() if cache is None else cache
        assert not self.cache.unsettled, "the cache was put back in the middle of a step"
        assert self.cache.rows == prompt[: self.cache.offset], (
            "the cache is not a prefix of the prompt"
        )
        assert self.cache.offset < len(prompt), "nothing left to feed"
        self.prefilled = prompt[self.cache.offset :]
        self.cache.rows += self.prefilled[:1]
        self.script.before("start")
        self.cache.rows += self.prefilled[1:]
        self.token = self.script.first
        return self.token

    def step(self) -> Step:
        assert self.pending is None, "step without a commit"
        assert self.cache is not None
        assert self.steps, "stepped past the end of the script"
        tokens, accepted = self.steps.pop(0)
        self.cache.unsettled += [self.token, *tokens]
        self.script.before("step")
        self.pending = tokens
        return Step(list(tokens), accepted)

    def commit(self, kept: int) -> None:
        assert self.pending is not None, "commit without a step"
        assert 1 <= kept <= len(self.pending)
        assert self.cache is not None
        self.script.before("commit")
        self.cache.rows += [self.token, *self.pending[: kept - 1]]
        self.cache.unsettled.clear()
        self.token, self.pending = self.pending[kept - 1], None
        self.commits.append(kept)


def fake_pair(tokenizer: TokenizerWrapper, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "target": SimpleNamespace(supports_trees=True, reason=None, make_cache=FakeCache),
        "drafter": object(),
        "tokenizer": tokenizer,
        "name": "fake",
        "context_length": 10_000,
        "config": {},
        "drafting_reason": None,
    }
    return SimpleNamespace(**(fields | changes))


def play(monkeypatch: pytest.MonkeyPatch, *scripts: Script) -> list[FakeDecoder]:
    """From now on, each request gets the next script. Returns the decoders that were made."""
    import sys

    waiting, made = list(scripts), []

    def decoder(request: Any) -> FakeDecoder:
        made.append(FakeDecoder(waiting.pop(0)))
        made[-1].request = request  # type: ignore[attr-defined]
        return made[-1]

    monkeypatch.setattr(sys.modules["mlx_redrafter.generate"], "_decoder", decoder)
    return made
