"""Files of prompts and of plain text, in the forms that people have them.

Prompts: JSON lines, or one JSON list, of objects with ``messages`` (OpenAI), ``conversations``
(ShareGPT), ``prompt`` (with or without ``completion``) or ``text``; a JSON string is a prompt too.
Any file whose name does not end in .jsonl, .ndjson or .json is plain text with one prompt a line:
a prompt of several lines needs JSON. What an assistant says in a file is left out, since the target
answers itself.

Texts, used as they are: the same files with ``text`` (or strings); a plain text file is one text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mlx_redrafter.errors import InputError

_JSON = {".json", ".jsonl", ".ndjson"}
_PROMPT_FORMS = '"messages", "conversations", "prompt" or "text"'
_USER = {"user", "human"}
_SYSTEM = {"system", "developer"}
_LEFT_OUT = {"assistant", "gpt", "chatgpt", "bot", "model", "tool", "function", "function_call"}

_T = TypeVar("_T")


@dataclass(frozen=True)
class Prompt:
    """What a user says in each turn, or with ``raw`` one text that is continued as it is."""

    turns: tuple[str, ...]
    system: str | None = None
    raw: bool = False


class _Unusable(Exception):
    """Why an entry cannot be used; the reader adds where it is."""


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file, in its order. Raises InputError with file and line."""
    if path.suffix.lower() in _JSON:
        return _read_json(path, _prompt, "prompts")
    prompts = [Prompt((line.strip(),)) for _, line in _lines(path)]
    if not prompts:
        raise InputError(f"{path} has no prompts: write one a line.")
    return prompts


def read_texts(path: Path) -> list[str]:
    """The texts of a file, in its order. Raises InputError with file and line."""
    if path.suffix.lower() in _JSON:
        return _read_json(path, _text, "texts")
    text = "\n".join(line for _, line in _lines(path, blank=True)).strip("\n")
    if not text.strip():
        raise InputError(f"{path} has no text.")
    return [text]


def _read_json(path: Path, convert: Callable[[Any], _T], what: str) -> list[_T]:
    found: list[_T] = []
    for where, entry in _entries(path):
        try:
            found.append(convert(entry))
        except _Unusable as error:
            raise InputError(f"{path}, {where}: {error}.") from None
    if not found:
        raise InputError(f"{path} has no {what}.")
    return found


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Each entry of a JSON list, or of JSON lines, and where it is."""
    lines = list(_lines(path))
    if lines and lines[0][1].lstrip().startswith("["):
        # Blank lines are put back, so that the decoder's line numbers are the file's.
        first = lines[0][0]
        rows = dict(lines)
        whole = "\n".join(rows.get(number, "") for number in range(first, lines[-1][0] + 1))
        entries = _parsed(path, first, whole, "one JSON list")
        yield from ((f"entry {index}", entry) for index, entry in enumerate(entries, start=1))
        return
    for number, line in lines:
        yield f"line {number}", _parsed(path, number, line, "one JSON object a line")


def _parsed(path: Path, first_line: int, text: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        line = first_line + (getattr(error, "lineno", 1) - 1)
        reason = getattr(error, "msg", None) or "a value that cannot be read"
        raise InputError(f"{path}, line {line}: {reason}; expected {expected}.") from None


def _lines(path: Path, blank: bool = False) -> Iterator[tuple[int, str]]:
    """The lines that are not blank (all with ``blank``), counted from 1, without their ends.

    Only a line feed ends a line: JSON may hold U+2028 and its like as they are.
    """
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = _decoded(path, number, raw)
                if blank or line.strip():
                    yield number, line
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): name a text file.") from None


def _decoded(path: Path, number: int, raw: bytes) -> str:
    try:
        line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}, line {number}: not UTF-8; save the file as UTF-8.") from None
    if "\0" in line:
        raise InputError(f"{path}, line {number}: not text; expected UTF-8 text or JSON lines.")
    return line.rstrip("\r\n")


def _prompt(entry: Any) -> Prompt:
    if isinstance(entry, str):
        return Prompt((_said(entry, "the prompt"),))
    if not isinstance(entry, dict):
        raise _Unusable(f"expected an object with {_PROMPT_FORMS}")
    if "messages" in entry:
        return _conversation(entry["messages"], "messages", "role", "content")
    if "conversations" in entry:
        messages = entry["conversations"]
        first = messages[0] if isinstance(messages, list) and messages else None
        openai = isinstance(first, dict) and "role" in first  # some sets mix the two forms
        keys = ("role", "content") if openai else ("from", "value")
        return _conversation(messages, "conversations", *keys)
    if isinstance(entry.get("prompt"), list):
        return _conversation(entry["prompt"], "prompt", "role", "content")
    if "prompt" in entry:
        return Prompt((_said(entry["prompt"], '"prompt"'),))
    if "text" in entry:
        return Prompt((_said(entry["text"], '"text"'),), raw=True)
    raise _Unusable(f"it has none of {_PROMPT_FORMS}")


def _text(entry: Any) -> str:
    if isinstance(entry, dict) and "text" in entry:
        return _said(entry["text"], '"text"')
    if isinstance(entry, str):
        return _said(entry, "the text")
    raise _Unusable('expected an object with "text", or a string')


def _conversation(messages: Any, name: str, role_key: str, content_key: str) -> Prompt:
    if not isinstance(messages, list):
        raise _Unusable(f'"{name}" must be a list of messages')
    turns: list[str] = []
    system: list[str] = []
    for message in messages:
        role = message.get(role_key) if isinstance(message, dict) else None
        if not isinstance(message, dict) or not isinstance(role, str):
            raise _Unusable(f'each of "{name}" must have "{role_key}" and "{content_key}"')
        role = role.lower()
        if role in _USER:
            turns.append(_said(_joined(message.get(content_key)), "a user message"))
        elif role in _SYSTEM:
            content = _joined(message.get(content_key))
            if content != "":  # often there, and empty
                system.append(_said(content, "the system message"))
        elif role not in _LEFT_OUT:
            raise _Unusable(f"the role {role[:40]!r} is unknown; expected system, user, assistant")
    if not turns:
        raise _Unusable(f'"{name}" has no user message')
    return Prompt(tuple(turns), "\n\n".join(system) or None)


def _joined(content: Any) -> Any:
    """The text of OpenAI's content parts, [{"type": "text", "text": ...}, ...]; else unchanged."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
        raise _Unusable("a message has a part that is no text")
    return "".join(str(text) for text in texts)


def _said(text: Any, what: str) -> str:
    if not isinstance(text, str):
        raise _Unusable(f"{what} must be a string")
    if not text.strip():
        raise _Unusable(f"{what} is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _Unusable(f"{what} is not valid Unicode") from None
    return text
