"""What the verbs that write text share: their options, and how statistics are shown."""

from __future__ import annotations

import json
import os
import secrets
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_redrafter.decoding.options import DraftOptions, SamplingOptions
from mlx_redrafter.decoding.stats import GenerationStats
from mlx_redrafter.errors import InputError

if TYPE_CHECKING:
    from mlx_redrafter.chat import Totals
    from mlx_redrafter.load import ModelPair

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="A shipped name, a folder in MLX format, or owner/name of the Hub. "
        "Default: the built-in model.",
        show_default=False,
    ),
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        metavar="NAME",
        help="Its drafter, by name or folder. Default: the one that is known for the model.",
        show_default=False,
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="Of a shipped model: float32, bfloat16, float16, or 4bit as shipped. "
        "Default: the fast one on this machine.",
        show_default=False,
    ),
]
AdapterOption = Annotated[
    Path | None,
    typer.Option(
        "--adapter-path",
        metavar="FOLDER",
        help="A LoRA adapter that mlx-lm trained, applied to the model.",
        show_default=False,
    ),
]
MaxTokensOption = Annotated[
    int,
    typer.Option(
        "--max-tokens", "-m", help="Longest answer in tokens; -1: until the context is full."
    ),
]
TempOption = Annotated[float, typer.Option("--temp", help="Sampling temperature; 0 is greedy.")]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed",
        help="Makes sampled text repeatable, with drafting on or off. Default: a new one.",
        show_default=False,
    ),
]
SystemPromptOption = Annotated[
    str | None,
    typer.Option("--system-prompt", metavar="TEXT", help="System prompt.", show_default=False),
]
TemplateConfigOption = Annotated[
    str | None,
    typer.Option(
        "--chat-template-config",
        metavar="JSON",
        help="""Settings of the chat template, say '{"enable_thinking": false}'.""",
        show_default=False,
    ),
]


def _default(text: str, value: int) -> str:
    return f"{text} Default: {value}, or what fits the others."


BeamWidthOption = Annotated[
    int | None,
    typer.Option(
        "--beam-width",
        help=_default("Beams of the drafter.", DraftOptions.beam_width),
        show_default=False,
    ),
]
BeamLengthOption = Annotated[
    int | None,
    typer.Option(
        "--beam-length",
        help=_default("Tokens drafted in a row.", DraftOptions.beam_length),
        show_default=False,
    ),
]
TokenBudgetOption = Annotated[
    int | None,
    typer.Option(
        "--token-budget",
        help=_default("Drafted tokens verified in a step.", DraftOptions.token_budget),
        show_default=False,
    ),
]
NoDraftOption = Annotated[bool, typer.Option("--no-draft", help="Decode plainly.")]


def load_pair(
    model: str | None,
    drafter: str | None,
    dtype: str | None,
    adapter_path: Path | None = None,
    plain: bool = False,
) -> ModelPair:
    """``load`` with what was given; its own defaults for the rest. ``plain``: without a drafter."""
    from mlx_redrafter.load import load

    given: dict[str, Any] = {
        "model": model,
        "drafter": drafter,
        "dtype": dtype,
        "adapter_path": adapter_path,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if plain:
        given["drafter"] = None
    return load(**given)


def draft_options(
    no_draft: bool,
    drafter: str | None,
    beam_width: int | None,
    beam_length: int | None,
    token_budget: int | None,
) -> DraftOptions | None:
    """None for --no-draft, which goes with no other option of drafting."""
    given = {
        "--drafter": drafter,
        "--beam-width": beam_width,
        "--beam-length": beam_length,
        "--token-budget": token_budget,
    }
    named = [name for name, value in given.items() if value is not None]
    if no_draft and named:
        raise InputError(f"{', '.join(named)} cannot go with --no-draft: leave out one or other.")
    if no_draft:
        return None
    return DraftOptions.fitting(beam_width, beam_length, token_budget)


def sampling_options(temp: float, seed: int | None) -> SamplingOptions:
    """Without a seed, a new one is drawn where it matters."""
    if temp == 0 and seed is not None:
        note("--seed has no effect at temperature 0.")
    if seed is None:
        seed = secrets.randbits(32) if temp > 0 else SamplingOptions.seed
    return SamplingOptions(temp, seed)


def template_config(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise InputError(f"--chat-template-config is not JSON ({error}).") from error
    if not isinstance(config, dict):
        raise InputError("--chat-template-config must be a JSON object, in braces.")
    return config


def read_stdin() -> str:
    """All of stdin, without one line break at its end."""
    text = decode_utf8(sys.stdin.buffer.read(), "stdin")
    return text.removesuffix("\n").removesuffix("\r")


def decode_utf8(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source} is not UTF-8 at byte {error.start}: convert it first, say with iconv."
        ) from None


def stdin_has_text() -> bool:
    """Whether something is piped or redirected in."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # no stdin at all
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def prepare_stdout() -> None:
    """A terminal that cannot show a character gets a question mark, not a traceback."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def note(text: str) -> None:
    """A line that is not the answer."""
    print(text, file=sys.stderr, flush=True)


def status_line(stats: GenerationStats) -> str:
    parts = [f"drafting: {stats.drafting}", _count(stats.emitted, "token")]
    if stats.tokens_per_step is not None and stats.drafting == "on":
        parts.append(f"{stats.tokens_per_step:.2f} tokens per step")
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
    if stats.seed is not None:
        parts.append(f"seed {stats.seed}")
    return " \u00b7 ".join(parts)


def details(stats: GenerationStats, finish_reason: str, draft: DraftOptions | None) -> list[str]:
    """All statistics of an answer, for --verbose and /stats."""
    prompt = f"prompt: {_count(stats.prompt_tokens, 'token')}"
    if stats.cached_tokens:
        prompt += f" ({stats.cached_tokens} kept from before)"
    if stats.prompt_tokens_per_second is not None:
        prompt += f", {stats.prompt_tokens_per_second:.1f} tokens/s"
    lines = [f"{prompt}, first token after {stats.ttft_s:.2f} s"]
    answer = f"answer: {_count(stats.emitted, 'token')}, {_count(stats.steps, 'step')}"
    if stats.tokens_per_step is not None:
        answer += f", {stats.tokens_per_step:.2f} tokens per step"
    if stats.tokens_per_second is not None:
        answer += f", {stats.tokens_per_second:.1f} tokens/s"
    lines.append(f"{answer}, ended: {finish_reason}")
    if stats.drafting == "on" and stats.steps:
        shares = [
            f"{accepted}: {100 * steps / stats.steps:.0f} %"
            for accepted, steps in sorted(stats.acceptance_histogram.items())
        ]
        lines.append(f"drafted tokens accepted: {', '.join(shares)} of the steps")
    lines.append(f"drafting: {stats.drafting}")
    if stats.drafting == "on" and draft is not None:
        lines[-1] += (
            f" (beam_width {draft.beam_width}, beam_length {draft.beam_length}, "
            f"token_budget {draft.token_budget})"
        )
    if stats.seed is not None:
        lines.append(f"temperature: {stats.temperature:g}, seed {stats.seed}")
    lines.append(f"peak memory: {stats.peak_memory_bytes / 1e9:.2f} GB")
    return lines


def session_line(totals: Totals) -> str:
    """The sums over a conversation's answers, for /stats."""
    line = f"session: {_count(totals.answers, 'answer')}, {_count(totals.emitted, 'token')}"
    if totals.tokens_per_step is not None:
        line += f", {totals.tokens_per_step:.2f} tokens per step"
    if totals.tokens_per_second is not None:
        line += f", {totals.tokens_per_second:.1f} tokens/s"
    return line


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
