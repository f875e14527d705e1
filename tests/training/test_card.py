"""The card says what was measured, and no name can break its Markdown or its YAML."""

import json
import re
import shlex
from dataclasses import replace
from typing import Any

import pytest

from mlx_redrafter.benchmarking import environment
from mlx_redrafter.benchmarking.paired import Spread
from mlx_redrafter.decoding.options import DraftOptions
from mlx_redrafter.training.acceptance import Acceptance, Estimate
from mlx_redrafter.training.card import CardFacts, DataFacts, card
from mlx_redrafter.training.proof import Difference, Proof, TemperatureProof

DRAFT = DraftOptions(3, 4, 7)
GREEDY = TemperatureProof(
    temperature=0.0,
    tokens_per_step=2.134,
    gain=Spread(1.52, 1.4, 1.6, 12),
    tokens_per_second=Spread(31.26, 30, 32, 12),
    plain_tokens_per_second=Spread(20.51, 20, 21, 12),
    texts=12,
    differences=(),
    defects=0,
)
WARM = replace(GREEDY, temperature=0.7, gain=None, tokens_per_second=None, defects=None)
ESTIMATE = Estimate(2.2, 0.03, (0.6, 0.4, 0.2, 0.1), 2200, 1000, 40)
FACTS = CardFacts(
    target="owner/model-1B",
    name="me/model-1B-redrafter",
    parameters=4_352_256,
    size_bytes=8_700_000,
    recipe={"draft_vocab": 4096, "loss": "soft"},
    data=DataFacts(
        rows=7832,
        tokens=2_255_616,
        trained_tokens=1_600_000,
        held_out_rows=128,
        sources=["/home/me/secret/rows.npz", "prompts.jsonl"],
        temperatures={0.7: 10, None: 3, 0.0: 20},
    ),
    environment={
        "versions": {"python": "3.12.1", "mlx": "0.32.4"},
        "machine": {"chip": "Apple M4", "device": "gpu", "cores": 10},
        "date": "2026-01-02",
        "commit": None,
    },
    licence="apache-2.0",
    loss=2.4751,
    agreement=[0.513, 0.477],
    acceptance=Acceptance(DRAFT, ESTIMATE, {0.0: ESTIMATE}),
    proof=Proof(DRAFT, 128, 12, (GREEDY, WARM)),
    curves="/home/me/out/curves.png",
)


def front_matter(text: str) -> dict[str, Any]:
    """Each value is JSON on a line of its own."""
    begin, head, _ = text.split("---\n", 2)
    assert begin == ""
    lines = [line.split(": ", 1) for line in head.splitlines()]
    return {key: json.loads(value) for key, value in lines}


def rows(text: str) -> list[list[str]]:
    """Cells of all tables, split where Markdown would."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]


def test_says_all_that_was_measured() -> None:
    text = card(FACTS)
    assert front_matter(text) == {
        "library_name": "mlx",
        "license": "apache-2.0",
        "base_model": "owner/model-1B",
        "tags": ["mlx", "mlx-redrafter", "speculative-decoding", "redrafter"],
    }
    commands = text.split("```sh\n")[1].split("\n```")[0].splitlines()
    assert commands == [
        "mlx-redrafter chat --model owner/model-1B --drafter me/model-1B-redrafter",
    ]
    found = rows(text)
    for row in (
        ["0", "2.13", "1.520 \\[1.400, 1.600\\]", "31.3", "20.5", "12 of 12"],
        ["0.7", "2.13", "not measured", "not measured", "20.5", "12 of 12"],
        ["all", "2.20 ± 0.03", "0.600", "0.400", "0.200", "0.100", "1,000"],
        ["2", "0.477"],
        ["draft_vocab", "4096"],
        ["not known", "3"],
        ["mlx", "0.32.4"],
        ["chip", "Apple M4"],
    ):
        assert row in found, row
    assert found.index(["0", "20"]) < found.index(["0.7", "10"]) < found.index(["not known", "3"])
    assert "4,352,256 parameters (8.7 MB)" in text
    assert "Loss on held-out rows: 2.475." in text
    assert "![Curves of the training](curves.png)" in text
    assert "Sources: rows.npz, prompts.jsonl." in text
    assert "/home" not in text
    assert "None" not in text


def test_what_was_not_measured_is_left_out() -> None:
    bare = replace(FACTS, loss=None, agreement=(), acceptance=None, proof=None, curves=None)
    text = card(replace(bare, licence=None, data=DataFacts(1, 2, 3, 4)))
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == [
        "# Drafter for owner/model-1B",
        "## Use",
        "## Data",
        "## Recipe",
        "## Made with",
    ]
    assert "license" not in text
    assert "None" not in text


@pytest.mark.parametrize(
    ("target", "base", "expected"),
    [
        ("owner/model", None, "owner/model"),
        ("/models/mine", None, None),
        ("smollm2-135m", None, None),
        (
            "smollm2-135m",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
        ("/models/mine", "not a repository", None),
    ],
)
def test_the_base_model_is_a_repository_or_nothing(
    target: str, base: str | None, expected: str | None
) -> None:
    text = card(replace(FACTS, target=target, base_model=base))
    assert front_matter(text).get("base_model") == expected
    assert "/models" not in text


EVIL = "a|b\nlicense: mit\n---\n```\n# <script>[x](y) `$(rm)` \u2028; echo"


def test_no_name_breaks_out() -> None:
    plain = card(FACTS)
    text = card(
        replace(
            FACTS,
            target=f"/models/{EVIL}",
            name=EVIL,
            licence=EVIL,
            recipe={EVIL: EVIL},
            data=replace(FACTS.data, sources=[EVIL]),
            environment={"versions": {"mlx": EVIL}, "machine": {"chip": EVIL}},
            curves=f"{EVIL}.png",
        )
    )
    assert front_matter(text)["license"] == EVIL
    assert "base_model" not in front_matter(text)
    body = text.split("---\n", 2)[2]
    assert body.count("\n```") == 2
    assert len([line for line in text.splitlines() if line.startswith("#")]) == len(
        [line for line in plain.splitlines() if line.startswith("#")]
    )
    code, rest = body.split("```sh\n")[1].split("\n```\n", 1)
    assert not re.search(r"(?<!\\)[<`]", rest)
    evil = [row for row in rows(rest) if "license: mit" in row[-1]]
    assert len(evil) == 3
    assert all(len(row) == 2 for row in evil)
    assert len(code.splitlines()) == 1
    name = " ".join(EVIL.split())
    assert shlex.split(code) == ["mlx-redrafter", "chat", "--model", name, "--drafter", name]


@pytest.mark.parametrize(
    ("defects", "expected"),
    [
        (0, "11 of 12, the others part at ties"),
        (2, "11 of 12, first difference at token 9, 2 positions that no tie explains"),
        (None, "11 of 12, first difference at token 9"),
    ],
)
def test_differing_texts_are_told(defects: int | None, expected: str) -> None:
    result = replace(GREEDY, differences=(Difference(3, 9),), defects=defects)
    text = card(replace(FACTS, proof=Proof(DRAFT, 128, 12, (result,))))
    assert expected in text


def test_takes_this_machines_description() -> None:
    text = card(replace(FACTS, environment=environment.describe()))
    names = [row[0] for row in rows(text)]
    assert {"mlx", "mlx-lm", "mlx-redrafter", "python", "chip", "system"} <= set(names)
