"""The tokenizer inside a GGUF file, as the files that transformers and mlx-lm read."""

from __future__ import annotations

from typing import Any

from mlx_redrafter.formats.gguf import GGUF

# Token types that a text is searched for before BPE.
_CONTROL, _USER_DEFINED = 3, 4

# Control tokens that end a text besides the file's own eos, as llama.cpp has it.
_END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "</s>")

_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
# llama.cpp's pre-tokenizers, by `tokenizer.ggml.pre`. "smollm" cuts at every digit, \p{N}, and then
# as GPT-2 does. Digits go first, so that a space before a number is a token of its own.
_PRE_TOKENIZERS = {"smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL]}


FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def contents(file: GGUF) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What goes into FILES."""
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    if file.get("tokenizer.ggml.model", str) != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise file.error(f"has a tokenizer of an unknown kind ({pre})")
    if file.metadata.get("tokenizer.ggml.add_bos_token", False):
        raise file.error("has a tokenizer that adds a first token")
    tokens: list[str] = file.get("tokenizer.ggml.tokens", list)
    types: list[int] = file.get("tokenizer.ggml.token_type", list)
    merges = [merge.split(" ") for merge in file.get("tokenizer.ggml.merges", list)]
    vocab = {token: i for i, token in enumerate(tokens)}
    known = all(len(pair) == 2 and {*pair, "".join(pair)} <= vocab.keys() for pair in merges)
    if len(types) != len(tokens) or len(vocab) != len(tokens) or not known:
        raise file.error("has a damaged tokenizer")
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, tokens[i], special=kind == _CONTROL)
            for i, kind in enumerate(types)
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            # Bytes that the vocabulary lacks are dropped: its unknown token is an end token.
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }
    return tokenizer, _settings(file, tokens, types), special_ids(file)


def special_ids(file: GGUF) -> dict[str, Any]:
    """The ids that a config names; eos is a list of all that end a text."""
    tokens = file.get("tokenizer.ggml.tokens", list)
    types = file.get("tokenizer.ggml.token_type", list)
    ends = [file.get("tokenizer.ggml.eos_token_id", int)]
    ends += [_role(file, role) for role in ("eot", "eom")]
    ends += [i for i, kind in enumerate(types) if kind == _CONTROL and tokens[i] in _END_TOKENS]
    return {
        "bos_token_id": _role(file, "bos"),
        "eos_token_id": list(dict.fromkeys(i for i in ends if i is not None)),
        "pad_token_id": _role(file, "padding"),
    }


def _role(file: GGUF, role: str) -> int | None:
    value: int | None = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
    if value is not None and value >= len(file.get("tokenizer.ggml.tokens", list)):
        raise file.error(f"has no token {value}, its {role} token")
    return value


def _added(id: int, content: str, special: bool) -> dict[str, Any]:
    spaces = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id, "content": content, **spaces, "special": special}


def _settings(file: GGUF, tokens: list[str], types: list[int]) -> dict[str, Any]:
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {name: _role(file, role) for name, role in roles.items()}
    settings: dict[str, Any] = {
        # Not the original's GPT2Tokenizer: transformers 5 makes that one from vocabulary and merges
        # alone, and so forgets the digits. This class takes tokenizer.json as it is.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": tokens[i] for name, i in named.items() if i is not None},
        "additional_special_tokens": [
            token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL
        ],
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.get("llama.context_length", int),
    }
    if template := file.metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return settings
