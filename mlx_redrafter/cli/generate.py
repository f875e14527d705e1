"""`mlx-redrafter generate`: answer one prompt."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from mlx_redrafter.cli import common
from mlx_redrafter.decoding.options import SamplingOptions
from mlx_redrafter.errors import InputError
from mlx_redrafter.generate import (
    DEFAULT_MAX_TOKENS,
    Generation,
    check_limits,
    stream_generate,
)

DEFAULT_PROMPT = "hello"  # mlx-lm's


def generate(
    model: common.ModelOption = None,
    drafter: common.DrafterOption = None,
    dtype: common.DtypeOption = None,
    adapter_path: common.AdapterOption = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help=f'What to answer; - reads stdin. Default: "{DEFAULT_PROMPT}".',
            show_default=False,
        ),
    ] = None,
    max_tokens: common.MaxTokensOption = DEFAULT_MAX_TOKENS,
    temp: common.TempOption = SamplingOptions.temperature,
    seed: common.SeedOption = None,
    system_prompt: common.SystemPromptOption = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop",
            metavar="TEXT",
            help="End before this text; may be given again.",
            show_default=False,
        ),
    ] = None,
    beam_width: common.BeamWidthOption = None,
    beam_length: common.BeamLengthOption = None,
    token_budget: common.TokenBudgetOption = None,
    no_draft: common.NoDraftOption = False,
    ignore_chat_template: Annotated[
        bool, typer.Option("--ignore-chat-template", help="Continue the prompt as it stands.")
    ] = False,
    chat_template_config: common.TemplateConfigOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: text, tokens, stats.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show all statistics, on stderr.")
    ] = False,
) -> None:
    """Answer one prompt. The text goes to stdout, all else to stderr."""
    draft = common.draft_options(no_draft, drafter, beam_width, beam_length, token_budget)
    sampling = common.sampling_options(temp, seed)
    config = common.template_config(chat_template_config)
    check_limits(max_tokens, stop or [])
    if ignore_chat_template and (system_prompt is not None or config is not None):
        raise InputError(
            "--ignore-chat-template leaves no place for --system-prompt or --chat-template-config: "
            "leave out one or other."
        )
    text = _prompt(prompt)
    common.prepare_stdout()
    segments = stream_generate(
        common.load_pair(model, drafter, dtype, adapter_path, plain=no_draft),
        text,
        max_tokens=max_tokens,
        sampling=sampling,
        draft=draft,
        stop=stop or [],
        system_prompt=system_prompt,
        ignore_chat_template=ignore_chat_template,
        chat_template_config=config,
    )
    parts: list[str] = []
    tokens: list[int] = []
    for segment in segments:
        parts.append(segment.text)
        tokens += segment.tokens
        if segment.text and not as_json:
            sys.stdout.write(segment.text)
            sys.stdout.flush()
    assert segment.finish_reason is not None
    assert segment.stats is not None
    if as_json:
        _print_json(Generation("".join(parts), tokens, segment.finish_reason, segment.stats))
    else:
        print(flush=True)
    if verbose:
        for line in common.details(segment.stats, segment.finish_reason, draft):
            common.note(line)
    elif not as_json:
        common.note(common.status_line(segment.stats))


def _prompt(given: str | None) -> str:
    if given == "-":
        given = common.read_stdin()
        if not given.strip():
            raise InputError("stdin is empty: pipe the prompt in, or give it with --prompt.")
    elif given is None:
        if common.stdin_has_text():
            common.note("stdin is not read without --prompt -")
        given = DEFAULT_PROMPT
    elif not given.strip():
        raise InputError("the prompt is empty: say something with --prompt.")
    return given


def _print_json(result: Generation) -> None:
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "")
    content = {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_dict(),
    }
    print(json.dumps(content, ensure_ascii=encoding != "utf8"), flush=True)
