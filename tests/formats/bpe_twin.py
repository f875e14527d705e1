"""A slow twin of the tokenizer: the rules that llama.cpp calls `smollm`, on tokens and merges."""

import unicodedata
from itertools import pairwise

from tests.formats.gguf_files import byte_letters

_CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


def encode(text: str, tokens: list[str], merges: list[str], special: list[str]) -> list[int]:
    ids = {token: i for i, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    letters = byte_letters()
    out: list[int] = []
    for part in _cut_at_special(text, special):
        if part in special:
            out.append(ids[part])
            continue
        for piece in _cut_at_digits(part):
            for word in _words(piece):
                symbols = [letters[byte] for byte in word.encode()]
                # Letters that the vocabulary lacks are no symbols at all.
                symbols = _merge([symbol for symbol in symbols if symbol in ids], ranks)
                out += [ids[symbol] for symbol in symbols]
    return out


def _cut_at_special(text: str, special: list[str]) -> list[str]:
    parts, start, at = [], 0, 0
    while at < len(text):
        found = max((s for s in special if text.startswith(s, at)), key=len, default="")
        if found:
            parts += [text[start:at], found]
            start = at = at + len(found)
        else:
            at += 1
    return [part for part in (*parts, text[start:]) if part]


def _cut_at_digits(text: str) -> list[str]:
    """Every number character, \\p{N}, is a piece of its own."""
    pieces = [""]
    for char in text:
        if _is_number(char):
            pieces += [char, ""]
        else:
            pieces[-1] += char
    return [piece for piece in pieces if piece]


def _words(text: str) -> list[str]:
    r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    words, at = [], 0
    while at < len(text):
        end = _word_end(text, at)
        words.append(text[at:end])
        at = end
    return words


def _word_end(text: str, at: int) -> int:
    for ending in _CONTRACTIONS:
        if text.startswith(ending, at):
            return at + len(ending)
    first = at + 1 if text[at] == " " and at + 1 < len(text) else at
    for kind in (_is_letter, _is_number, _is_other):
        end = first
        while end < len(text) and kind(text[end]):
            end += 1
        if end > first:
            return end
    end = at
    while end < len(text) and _is_space(text[end]):
        end += 1
    # A run of white space leaves its last character to the word that follows.
    return end - 1 if end < len(text) and end - at > 1 else end


def _merge(symbols: list[str], ranks: dict[tuple[str, ...], int]) -> list[str]:
    while len(symbols) > 1:
        rank, at = min((ranks.get(pair, 1 << 60), i) for i, pair in enumerate(pairwise(symbols)))
        if rank == 1 << 60:
            break
        symbols = [*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :]]
    return symbols


def _is_letter(char: str) -> bool:
    return unicodedata.category(char)[0] == "L"


def _is_number(char: str) -> bool:
    return unicodedata.category(char)[0] == "N"


def _is_space(char: str) -> bool:
    return char.isspace() and char not in "\x1c\x1d\x1e\x1f"


def _is_other(char: str) -> bool:
    return not (_is_letter(char) or _is_number(char) or _is_space(char))
