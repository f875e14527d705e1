"""Text in, events out: chat template, stop rules, detokenizer, statistics.

The one place between the engine, which knows only tokens, and everything that shows text. Nothing
is printed. Importing this module is cheap: the engine comes with the first request.

What counts. ``tokens`` are the tokens drawn from the target up to the end of the answer; the one
that completes a stop string is the last of them, an end-of-sequence token (EOS) is not among them.
``emitted`` counts the EOS too, as mlx-lm's ``generation_tokens`` does. ``text`` is the text of
``tokens``, cut before the stop string; where max_tokens ends the answer inside a character, it ends
as the tokenizer decodes that, with a replacement character.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mlx_redrafter.decoding.options import DraftOptions, SamplingOptions
from mlx_redrafter.decoding.stats import GenerationStats
from mlx_redrafter.errors import InputError
from mlx_redrafter.prompt_cache import PromptCache
from mlx_redrafter.text import Piece, Transcript

if TYPE_CHECKING:
    from mlx_redrafter.decoding.loop import Decoder
    from mlx_redrafter.load import ModelPair

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "FinishReason",
    "Generation",
    "Message",
    "Piece",
    "PromptCache",
    "Segment",
    "check_limits",
    "drafting_status",
    "encode_prompt",
    "generate",
    "stream_generate",
]

DEFAULT_MAX_TOKENS = 256
_DRAFT = DraftOptions()
_SAMPLING = SamplingOptions()

Message = dict[str, Any]
"""{"role": "system" | "user" | "assistant" | ..., "content": text}"""

FinishReason = Literal["stop", "length", "cancelled"]
"""An EOS or a stop string; max_tokens or the model's context; the caller's wish."""


@dataclass(frozen=True)
class Segment:
    """What one step added to the answer.

    text           the new text; may be empty, and may lag behind the tokens within a character or
                   where a stop string may have begun
    tokens         the new tokens, without EOS
    from_draft     for each of them, whether it was drafted and accepted
    pieces         ``text`` by where it came from
    finish_reason  None but on the last segment
    stats          only on the last segment
    """

    text: str
    tokens: list[int]
    from_draft: list[bool]
    pieces: list[Piece]
    finish_reason: FinishReason | None = None
    stats: GenerationStats | None = None


@dataclass(frozen=True)
class Generation:
    """A whole answer. See the module's docstring for what ``tokens`` and ``text`` hold."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: GenerationStats


def generate(
    pair: ModelPair, prompt: str | Sequence[int] | Sequence[Message], **options: Any
) -> Generation:
    """``stream_generate``, all at once. Takes the same options."""
    text: list[str] = []
    tokens: list[int] = []
    for segment in stream_generate(pair, prompt, **options):
        text.append(segment.text)
        tokens += segment.tokens
    assert segment.finish_reason is not None
    assert segment.stats is not None
    return Generation("".join(text), tokens, segment.finish_reason, segment.stats)


def stream_generate(
    pair: ModelPair,
    prompt: str | Sequence[int] | Sequence[Message],
    *,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    sampling: SamplingOptions = _SAMPLING,
    draft: DraftOptions | None = _DRAFT,
    stop: str | Sequence[str] = (),
    system_prompt: str | None = None,
    ignore_chat_template: bool = False,
    chat_template_config: dict[str, Any] | None = None,
    cache: PromptCache | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Iterator[Segment]:
    """Answer ``prompt`` (a user's text, messages, or tokens), one segment a step.

    ``max_tokens`` -1 goes on until the context is full. ``draft`` None turns drafting off.
    ``cache`` keeps the rows of this request for the next one that begins with the same tokens.
    ``cancelled`` is asked before each step. Closing the iterator early, or an exception out of it,
    leaves ``cache`` with exactly the rows of what was yielded.

    Raises InputError at once, before any work.
    """
    began = time.perf_counter()
    stops = [stop] if isinstance(stop, str) else list(stop)
    check_limits(max_tokens, stops)
    tokens = encode_prompt(
        pair,
        prompt,
        system_prompt=system_prompt,
        ignore_chat_template=ignore_chat_template,
        chat_template_config=chat_template_config,
    )
    room = pair.context_length - len(tokens)
    if room < 1:
        raise InputError(
            f"the prompt has {len(tokens)} tokens and leaves no room for an answer in the model's "
            f"context of {pair.context_length}: shorten it."
        )
    request = _Request(
        pair=pair,
        prompt=tokens,
        limit=room if max_tokens == -1 else min(max_tokens, room),
        sampling=sampling,
        draft=draft if drafting_status(pair, draft) == "on" else None,
        stops=stops,
        cache=cache,
        cancelled=cancelled or (lambda: False),
        stats=GenerationStats(
            prompt_tokens=len(tokens),
            drafting=drafting_status(pair, draft),
            temperature=sampling.temperature,
            seed=sampling.seed if sampling.temperature > 0 else None,
        ),
    )
    return _stream(request, time.perf_counter() - began)


def check_limits(max_tokens: int, stops: Sequence[str] = ()) -> None:
    """Raise InputError where an answer could not be ended by these. Needs no model."""
    if max_tokens == 0 or max_tokens < -1:
        raise InputError(
            f"max_tokens is {max_tokens}; it must be at least 1, or -1 to go on until the context "
            "is full."
        )
    if not all(stops):
        raise InputError("a stop string is empty; leave it out.")


def drafting_status(pair: ModelPair, draft: DraftOptions | None) -> str:
    """The status line's words: "on", or "off (reason)"."""
    if draft is None:
        return "off (not asked for)"
    if not pair.target.supports_trees:
        return f"off ({pair.target.reason or pair.drafting_reason})"
    if pair.drafter is None:
        return f"off ({pair.drafting_reason or 'no drafter'})"
    return "on"


@dataclass
class _Request:
    pair: ModelPair
    prompt: list[int]
    limit: int
    sampling: SamplingOptions
    draft: DraftOptions | None
    stops: list[str]
    cache: PromptCache | None
    cancelled: Callable[[], bool]
    stats: GenerationStats


def _stream(request: _Request, encode_s: float) -> Iterator[Segment]:
    stats, keep = request.stats, request.cache
    decoder = _decoder(request)
    answer = _Answer(request)
    sequence = list(request.prompt)
    cache, rows = None, 0
    if keep is not None:
        cache, rows = keep.take(request.prompt, request.pair.target.make_cache)
    stats.cached_tokens = rows
    at_rest = False
    try:
        began = time.perf_counter()
        first = decoder.start(request.prompt, cache, max_tokens=request.limit)
        stats.prefill_s = time.perf_counter() - began
        stats.ttft_s = encode_s + stats.prefill_s
        stats.emitted = 1
        segment = answer.add([first], num_accepted=0)
        sequence.append(first)
        rows, at_rest = len(request.prompt), True
        yield segment
        while answer.finish_reason is None:
            if request.cancelled():
                yield answer.cancel()
                return
            at_rest = False
            began = time.perf_counter()
            step = decoder.step()
            emitted = stats.emitted
            segment = answer.add(step.tokens, step.num_accepted)
            kept = answer.emitted - emitted
            # Before the yield: however the caller goes on, or stops, the engine is at rest.
            decoder.commit(kept)
            stats.count_step(kept, step.num_accepted, time.perf_counter() - began)
            sequence += step.tokens[:kept]
            rows, at_rest = len(sequence) - 1, True
            yield segment
    finally:
        # The rows of everything before the last token that the caller was given. What an
        # interrupted call of the engine has left beyond them is forgotten.
        if keep is not None and cache is not None:
            keep.put(cache, sequence[:rows], at_rest)


class _Answer:
    """The answer so far: applies the stop rules to each token in turn."""

    def __init__(self, request: _Request) -> None:
        self._eos = eos_tokens(request.pair)
        self._limit = request.limit
        self._stats = request.stats
        self._transcript = Transcript(request.pair.tokenizer, request.stops)
        self.emitted = 0
        self.finish_reason: FinishReason | None = None

    def add(self, tokens: Sequence[int], num_accepted: int) -> Segment:
        """Take a step's tokens, up to the one that ends the answer."""
        taken: list[int] = []
        for index, token in enumerate(tokens):
            self.emitted += 1
            if token in self._eos:
                self.finish_reason = "stop"
                break
            taken.append(token)
            if self._transcript.add(token, drafted=index < num_accepted):
                self.finish_reason = "stop"
                break
            if self.emitted == self._limit:
                self.finish_reason = "length"
                break
        return self._segment(taken, [index < num_accepted for index in range(len(taken))])

    def cancel(self) -> Segment:
        self.finish_reason = "cancelled"
        return self._segment([], [])

    def _segment(self, tokens: list[int], from_draft: list[bool]) -> Segment:
        ended = self.finish_reason is not None
        if not ended:
            pieces = self._transcript.take()
        else:
            pieces = self._transcript.finish(whole=self.finish_reason != "cancelled")
            self._stats.peak_memory_bytes = _peak_memory()
        return Segment(
            text="".join(piece.text for piece in pieces),
            tokens=tokens,
            from_draft=from_draft,
            pieces=pieces,
            finish_reason=self.finish_reason,
            stats=self._stats if ended else None,
        )


def _decoder(request: _Request) -> Decoder:
    from mlx_redrafter.decoding.loop import Decoder

    pair = request.pair
    drafter = pair.drafter if request.draft is not None else None
    return Decoder(pair.target, drafter, request.draft, request.sampling)


def _peak_memory() -> int:
    import mlx.core as mx

    return int(mx.get_peak_memory())


def eos_tokens(pair: ModelPair) -> set[int]:
    """All of the model's EOS ids: the tokenizer's, and those of the (generation) config."""
    tokens = set(pair.tokenizer.eos_token_ids)
    configured = pair.config.get("eos_token_id")
    if isinstance(configured, int):
        tokens.add(configured)
    elif configured:
        tokens.update(configured)
    return tokens


def encode_prompt(
    pair: ModelPair,
    prompt: str | Sequence[int] | Sequence[Message],
    *,
    system_prompt: str | None = None,
    ignore_chat_template: bool = False,
    chat_template_config: dict[str, Any] | None = None,
) -> list[int]:
    """The tokens of a prompt, as mlx-lm makes them, with one difference.

    Text goes through the model's chat template if it has one. Where a message other than the
    assistant's contains one of the template's control tokens (say ``<|im_end|>``), mlx-lm lets it
    end the turn; here it is encoded as the characters that it consists of. A raw prompt
    (``ignore_chat_template``, or a model without a template) is taken as it is, control tokens
    included, as in mlx-lm.
    """
    tokenizer = pair.tokenizer
    if not prompt:
        raise InputError("the prompt is empty.")
    if not isinstance(prompt, str):
        if isinstance(prompt[0], dict):
            messages = [dict(message) for message in prompt if isinstance(message, dict)]
            if ignore_chat_template or not tokenizer.has_chat_template:
                raise InputError("messages need a chat template: give the prompt as plain text.")
            return _encode_messages(tokenizer, system_prompt, messages, chat_template_config)
        return [int(token) for token in prompt if not isinstance(token, dict)]
    if ignore_chat_template or not tokenizer.has_chat_template:
        why = "it is ignored" if ignore_chat_template else "this model has none"
        for name, given in (
            ("system prompt", system_prompt),
            ("template setting", chat_template_config),
        ):
            if given:
                raise InputError(f"a {name} needs the chat template, but {why}: leave it out.")
        _check_text(prompt)
        bos = getattr(tokenizer, "bos_token", None)
        tokens = tokenizer.encode(
            prompt, add_special_tokens=bos is None or not prompt.startswith(bos)
        )
        if not tokens:
            raise InputError("the prompt has no tokens.")
        return list(tokens)
    messages = [{"role": "user", "content": prompt}]
    return _encode_messages(tokenizer, system_prompt, messages, chat_template_config)


_BREAK = "\U0010fffd"  # private use: marks where a control token in a message is broken


def _encode_messages(
    tokenizer: Any,
    system_prompt: str | None,
    messages: list[Message],
    chat_template_config: dict[str, Any] | None,
) -> list[int]:
    if system_prompt is not None:
        messages = [{"role": "system", "content": system_prompt}, *messages]
    control = _control_tokens(tokenizer)
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            _check_text(content)
            if message.get("role") != "assistant":
                message["content"] = _broken(content.replace(_BREAK, ""), control)
    try:
        rendered: str = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            **{"add_generation_prompt": True, **(chat_template_config or {})},
        )
    except Exception as error:  # a template is a program of the model's author
        reason = " ".join(str(error).split()) or type(error).__name__
        hint = " (try without a system prompt)" if messages[0].get("role") == "system" else ""
        raise InputError(f"the model's chat template refused the prompt: {reason}{hint}") from error
    tokens: list[int] = []
    for part in rendered.split(_BREAK):
        tokens += tokenizer.encode(part, add_special_tokens=False)
    if not tokens:
        raise InputError("the chat template gave an empty prompt.")
    return tokens


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError("the prompt is not valid UTF-8: check the encoding of its source.") from (
            None
        )


def _control_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Matches what a message must not say: special tokens, and markup of the template's own."""
    template = getattr(tokenizer, "chat_template", None)
    template = template if isinstance(template, str) else ""
    names = {
        token.content
        for token in getattr(tokenizer, "added_tokens_decoder", {}).values()
        if len(token.content) > 1
        and not token.content.isspace()
        and (
            token.special
            or (token.content in template and not token.content.replace("_", "").isalnum())
        )
    }
    longest_first = sorted(names, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _broken(text: str, control: re.Pattern[str]) -> str:
    """Mark a break in each control token, so that it is encoded in two parts."""

    def mend(match: re.Match[str]) -> str:
        token = match[0]
        return token[0] + _BREAK + _broken(token[1:], control)

    return control.sub(mend, text)
