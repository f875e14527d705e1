"""Prompt sets: JSON lines of {"id", "category", "turns": [text, ...]}; the first turn is used."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_redrafter.errors import InputError


@dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    text: str


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Prompts of a file. With a limit, spread over the whole file, since kinds stand together."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        prompts = [Prompt(str(r["id"]), str(r.get("category", "")), r["turns"][0]) for r in rows]
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): give a prompt file.") from None
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise InputError(
            f'{path} is not a prompt file ({error}): each line is {{"id", "category", "turns"}}.'
        ) from None
    if not prompts:
        raise InputError(f"{path} has no prompts.")
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise InputError(f"{path} has two prompts of the same id: give each its own.")
    if limit is None or limit >= len(prompts):
        return prompts
    if limit < 1:
        raise InputError(f"limit is {limit}; it must be at least 1.")
    return [prompts[(2 * i + 1) * len(prompts) // (2 * limit)] for i in range(limit)]


def chat_tokens(tokenizer: Any, text: str) -> list[int]:
    """The prompt's tokens in the model's chat template, where it has one."""
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    full = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(full, add_special_tokens=False))


def filler(tokenizer: Any, prompts: Sequence[Prompt], count: int) -> list[int]:
    """``count`` tokens of running text, made of the prompts over and over."""
    tokens = [token for p in prompts for token in tokenizer.encode(p.text + "\n")]
    return list(itertools.islice(itertools.cycle(tokens), count))
