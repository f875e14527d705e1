"""Prompt files as people have them: every form is read, and what is wrong is told in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_redrafter.errors import InputError
from mlx_redrafter.training.prompts import Prompt, read_prompts, read_texts


def write(tmp_path: Path, name: str, *entries: Any) -> Path:
    path = tmp_path / name
    path.write_text("\n".join(json.dumps(entry) for entry in entries), encoding="utf-8")
    return path


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "not the target's own", "tool_calls": None},
    {"role": "tool", "content": None},
    {"role": "user", "content": [{"type": "text", "text": "Two"}, {"type": "text", "text": "?"}]},
]
SHAREGPT = [
    {"from": "system", "value": ""},
    {"from": "human", "value": "One?"},
    {"from": "gpt", "value": None},
]


@pytest.mark.parametrize(
    ("entry", "prompt"),
    [
        ({"messages": MESSAGES, "id": 3}, Prompt(("One?", "Two?"), "Be brief.")),
        ({"conversations": SHAREGPT}, Prompt(("One?",))),
        ({"conversations": [{"role": "user", "content": "One?"}]}, Prompt(("One?",))),
        ({"prompt": "One?"}, Prompt(("One?",))),
        ({"prompt": "One?", "completion": "1"}, Prompt(("One?",))),
        ({"prompt": MESSAGES[:2], "completion": []}, Prompt(("One?",), "Be brief.")),
        ({"text": "Once upon a"}, Prompt(("Once upon a",), raw=True)),
        ("One?", Prompt(("One?",))),
    ],
)
def test_every_form_is_read(tmp_path: Path, entry: Any, prompt: Prompt) -> None:
    other = {"prompt": "between\u2028lines"}
    for name in ("x.jsonl", "x.JSON", "x.ndjson"):
        assert read_prompts(write(tmp_path, name, entry, other))[0] == prompt
    found = read_prompts(write(tmp_path, "list.json", [entry, other]))
    assert found == [prompt, Prompt(("between\u2028lines",))]


def test_a_plain_file_has_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffOne?\r\n\r\n  Zwei ä\u2028b \r\nThree".encode())
    assert [prompt.turns for prompt in read_prompts(path)] == [
        ("One?",),
        ("Zwei ä\u2028b",),
        ("Three",),
    ]


def test_blank_lines_a_mark_at_the_start_and_long_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    long = "a" * 3_000_000
    path.write_bytes(f'\ufeff{{"prompt": "a"}}\r\n\r\n \n{{"prompt": "{long}"}}\r\n\n'.encode())
    assert [prompt.turns[0] for prompt in read_prompts(path)] == ["a", long]
    path.write_bytes('\ufeff\n\n[{"prompt": "a"},\n\n"b"]'.encode())
    assert [prompt.turns[0] for prompt in read_prompts(path)] == ["a", "b"]


def test_texts(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes("\ufeffOne.\r\n\r\n  Two.\n".encode())
    assert read_texts(path) == ["One.\n\n  Two."]
    assert read_texts(write(tmp_path, "x.jsonl", {"text": "One.\n"}, "Two.")) == ["One.\n", "Two."]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": "a"', "expected one JSON object a line"),
        (b"not json", "expected one JSON object a line"),
        (b"[" * 100_000, "expected one JSON object a line"),
        (b"3", "expected an object"),
        (b"[1]", "expected an object"),
        (b"{}", "none of"),
        (b'{"prompt": 3}', "must be a string"),
        (b'{"prompt": " "}', "is empty"),
        (b'{"prompt": null}', "must be a string"),
        (b'{"prompt": "\\ud800"}', "not valid Unicode"),
        (b'{"text": ["a"]}', "must be a string"),
        (b'{"messages": "a"}', "must be a list"),
        (b'{"messages": []}', "no user message"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "no user message"),
        (b'{"messages": ["a"]}', '"role" and "content"'),
        (b'{"messages": [{"role": 3, "content": "a"}]}', '"role" and "content"'),
        (b'{"messages": [{"role": "user"}]}', "must be a string"),
        (b'{"messages": [{"role": "judge", "content": "a"}]}', "'judge' is unknown"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "no text"),
        (b'{"conversations": [{"from": "human", "value": 3}]}', "must be a string"),
        (b'{"conversations": [{"who": "user", "content": "a"}]}', '"from" and "value"'),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "\x00"}', "not text"),
    ],
)
def test_a_bad_entry_is_told_with_its_line(tmp_path: Path, line: bytes, says: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n\n' + line + b"\n")
    with pytest.raises(InputError, match=says) as told:
        read_prompts(path)
    assert str(path) in str(told.value)
    assert "line 3" in str(told.value)
    assert "\n" not in str(told.value)


def test_a_bad_list_is_told_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('\n[{"prompt": "a"},\n\n{"prompt": }]')
    with pytest.raises(InputError, match="line 4"):
        read_prompts(path)
    path.write_text('[{"prompt": "a"}, {"prompt": 1}]')
    with pytest.raises(InputError, match="entry 2"):
        read_prompts(path)


def test_a_file_without_entries_is_refused(tmp_path: Path) -> None:
    for name in ("x.jsonl", "x.json", "x.txt"):
        for content in ("", "\n \r\n", "[]" if name != "x.txt" else ""):
            (tmp_path / name).write_text(content)
            for read in (read_prompts, read_texts):
                with pytest.raises(InputError, match="has no"):
                    read(tmp_path / name)
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(InputError, match="cannot read"):
            read_prompts(path)
    with pytest.raises(InputError, match='"text"'):
        read_texts(write(tmp_path, "x.jsonl", {"prompt": "a"}))
