"""The project's own prompts, and how a prompt file is read."""

from collections import Counter
from pathlib import Path

import pytest

from mlx_redrafter.benchmarking.prompts import read_prompts
from mlx_redrafter.benchmarking.scripts import OWN_PROMPTS
from mlx_redrafter.errors import InputError


def test_own_prompts_cover_eight_kinds() -> None:
    prompts = read_prompts(OWN_PROMPTS)
    kinds = Counter(prompt.category for prompt in prompts)
    assert len(prompts) >= 48
    assert len(kinds) == 8
    assert min(kinds.values()) >= 6
    lengths = [len(prompt.text.split()) for prompt in prompts]
    assert min(lengths) < 12
    assert 150 < max(lengths) < 250


def test_a_limit_is_spread_over_the_kinds() -> None:
    assert len({prompt.category for prompt in read_prompts(OWN_PROMPTS, limit=8)}) == 8
    assert len(read_prompts(OWN_PROMPTS, limit=1)) == 1
    assert read_prompts(OWN_PROMPTS, limit=1000) == read_prompts(OWN_PROMPTS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no prompts"),
        ("not JSON\n", "not a prompt file"),
        ('{"id": 1, "turns": []}\n', "not a prompt file"),
        ('{"id": 1, "turns": ["a"]}\n{"id": 1, "turns": ["b"]}\n', "same id"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_prompts(path)
    with pytest.raises(InputError, match="cannot read"):
        read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="limit"):
        read_prompts(OWN_PROMPTS, limit=0)
