"""The README.md of a trained drafter: what it is, how it was made, what it was measured to give."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from mlx_redrafter.benchmarking.paired import Spread
from mlx_redrafter.training.acceptance import Acceptance, Estimate
from mlx_redrafter.training.proof import Proof, TemperatureProof

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class DataFacts:
    """The corpus: ``sources`` are files (only their names are shown), ``trained_tokens`` those that
    the target wrote, ``temperatures`` the rows at each, None where it is not known."""

    rows: int
    tokens: int
    trained_tokens: int
    held_out_rows: int
    sources: Sequence[str] = ()
    temperatures: Mapping[float | None, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CardFacts:
    """All that a card says; what was not measured is None and left out.

    target       as the user named it: of a folder only the last part is shown
    base_model   owner/name on the Hub, where the target is known to be there
    name         of the drafter: a repository, a folder or a registered name
    licence      as the Hub writes it (``apache-2.0``); None where it is not known
    recipe       setting -> value
    environment  of ``benchmarking.environment.describe``
    loss, agreement  on held-out rows; agreement per depth
    curves       the picture's file name, beside the card
    """

    target: str
    name: str
    parameters: int
    size_bytes: int
    recipe: Mapping[str, object]
    data: DataFacts
    environment: Mapping[str, Any]
    base_model: str | None = None
    licence: str | None = None
    loss: float | None = None
    agreement: Sequence[float] = ()
    acceptance: Acceptance | None = None
    proof: Proof | None = None
    curves: str | None = None


def card(facts: CardFacts) -> str:
    """The text of README.md, front matter included."""
    target, name = _public(facts.target), _public(facts.name)
    sections = [
        _front_matter(facts),
        f"# Drafter for {_inline(target)}",
        f"A recurrent drafter (ReDrafter) of {facts.parameters:,} parameters "
        f"({facts.size_bytes / 1e6:.1f} MB), distilled from {_inline(target)}'s own "
        "choice of words. It guesses the next tokens; the model checks them, and the text is the "
        "model's own, up to floating-point ties. What it gains is below.",
        "## Use",
        "```sh\nmlx-redrafter chat "
        f"--model {shlex.quote(target)} --drafter {shlex.quote(name)}\n```",
        *_decoding(facts.proof),
        *_acceptance(facts.acceptance),
        *_validation(facts),
        *_data(facts.data),
        "## Recipe",
        _table(["setting", "value"], list(facts.recipe.items())),
        "## Made with",
        _table(["", ""], _versions(facts.environment)),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(facts: CardFacts) -> str:
    """YAML, each value as JSON, which YAML includes: no name can break out of it."""
    values: dict[str, object] = {"library_name": "mlx"}
    if facts.licence is not None:
        values["license"] = facts.licence
    # The Hub refuses a base model that is no repository.
    for name in (facts.base_model, facts.target):
        if name is not None and _HUB_NAME.fullmatch(name):
            values["base_model"] = name
            break
    values["tags"] = ["mlx", "mlx-redrafter", "speculative-decoding", "redrafter"]
    lines = [f"{key}: {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(["---", *lines, "---"])


def _decoding(proof: Proof | None) -> list[str]:
    if proof is None:
        return []
    draft = proof.draft
    table = _table(
        [
            "temperature",
            "tokens per step",
            "gain [quartiles]",
            "tokens/s",
            "plain tokens/s",
            "equal texts",
        ],
        [
            (
                f"{each.temperature:g}",
                _number(each.tokens_per_step, 2),
                "not measured" if each.gain is None else each.gain,
                _median(each.tokens_per_second),
                _median(each.plain_tokens_per_second),
                _equal(each),
            )
            for each in proof.results
        ],
    )
    return [
        "## Measured in decoding",
        f"{proof.prompts} prompts, answers of up to {proof.max_tokens} tokens, decoded plainly and "
        f"with the drafter in turn (beam_width {draft.beam_width}, beam_length "
        f"{draft.beam_length}, token_budget {draft.token_budget}). Gain is the median ratio of "
        "tokens per second over the pairs, without prefill.",
        table,
    ]


def _equal(result: TemperatureProof) -> str:
    text = f"{result.equal_texts} of {result.texts}"
    if not result.differences:
        return text
    if result.defects == 0:
        return f"{text}, the others part at ties"
    first = min(each.token for each in result.differences)
    defects = "" if result.defects is None else f", {result.defects} positions that no tie explains"
    return f"{text}, first difference at token {first}{defects}"


def _acceptance(acceptance: Acceptance | None) -> list[str]:
    if acceptance is None:
        return []
    draft, overall = acceptance.draft, acceptance.overall
    depths = [f"at least {i}" for i in range(1, len(overall.by_position) + 1)]
    rows = [("all", overall), *((f"{t:g}", e) for t, e in acceptance.by_temperature.items())]
    return [
        "## Acceptance on held-out text",
        "Decoding steps replayed on rows that were never trained on (beam_width "
        f"{draft.beam_width}, beam_length {draft.beam_length}, token_budget {draft.token_budget}); "
        "share of steps that accepted so many drafted tokens.",
        _table(
            ["temperature", "tokens per step", *depths, "steps"],
            [(label, *_estimate(each)) for label, each in rows],
        ),
    ]


def _estimate(estimate: Estimate) -> tuple[object, ...]:
    error = "" if estimate.error is None else f" ± {estimate.error:.2f}"
    shares = (f"{share:.3f}" for share in estimate.by_position)
    return f"{estimate.tokens_per_step:.2f}{error}", *shares, f"{estimate.steps:,}"


def _validation(facts: CardFacts) -> list[str]:
    if facts.loss is None and not facts.agreement and facts.curves is None:
        return []
    sections = ["## Validation"]
    if facts.loss is not None:
        sections.append(f"Loss on held-out rows: {facts.loss:.3f}.")
    if facts.agreement:
        sections += [
            "Share of held-out positions where the drafter's first choice is the target's, given "
            "the text up to there and within its vocabulary:",
            _table(
                ["depth", "agreement"],
                [(i, f"{share:.3f}") for i, share in enumerate(facts.agreement, start=1)],
            ),
        ]
    if facts.curves is not None:
        sections.append(f"![Curves of the training]({_link(PurePath(facts.curves).name)})")
    return sections


def _data(data: DataFacts) -> list[str]:
    text = (
        f"{data.rows:,} rows, {data.tokens:,} tokens, {data.trained_tokens:,} of them "
        "answers or given texts, which alone are trained on. "
        f"{data.held_out_rows:,} rows were held out."
    )
    if data.sources:
        names = ", ".join(_inline(_public(source)) for source in data.sources)
        text += f" Sources: {names}."
    sections = ["## Data", text]
    if data.temperatures:
        known = sorted((t, n) for t, n in data.temperatures.items() if t is not None)
        rows: list[tuple[object, ...]] = [(f"{t:g}", f"{n:,}") for t, n in known]
        if None in data.temperatures:
            rows.append(("not known", f"{data.temperatures[None]:,}"))
        sections.append(_table(["temperature", "rows"], rows))
    return sections


def _versions(environment: Mapping[str, Any]) -> list[tuple[object, object]]:
    machine = environment.get("machine", {})
    rows: list[tuple[object, object]] = list(environment.get("versions", {}).items())
    rows += [(name, machine[name]) for name in ("chip", "device", "system") if name in machine]
    return rows + [(key, environment[key]) for key in ("date", "commit") if environment.get(key)]


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_inline(str(v)) for v in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _one_line(text: str) -> str:
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", text).split())


def _public(name: str) -> str:
    """A name without its place on this machine, on one line; owner/name of the Hub stays."""
    line = _one_line(name)
    if _HUB_NAME.fullmatch(line):
        return line
    return PurePath(line).name or "model"


def _inline(text: str) -> str:
    """Text that Markdown shows as it is, on one line and in one cell."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", _one_line(text))


def _link(name: str) -> str:
    return re.sub(r"[^\w.-]", lambda match: "".join(f"%{b:02X}" for b in match[0].encode()), name)


def _median(spread: Spread | None) -> str:
    return _number(None if spread is None else spread.median, 1)


def _number(value: float | None, digits: int) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"
