"""A conversation: its messages, its cache and what fits into the context. No terminal code.

Each answer is made from the whole conversation, rendered anew by the chat template; the rows of the
longest prefix that the cache holds are not computed again. So an edited past (`retry`, another
system prompt, thinking that the template leaves out) needs no care: warm and cold agree.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_redrafter.decoding.options import DraftOptions, SamplingOptions
from mlx_redrafter.decoding.stats import GenerationStats
from mlx_redrafter.errors import FormatError, InputError, RedrafterError
from mlx_redrafter.generate import (
    DEFAULT_MAX_TOKENS,
    FinishReason,
    Message,
    PromptCache,
    Segment,
    drafting_status,
    encode_prompt,
    stream_generate,
)
from mlx_redrafter.text import REPLACEMENT

if TYPE_CHECKING:
    from mlx_redrafter.load import ModelPair

FORMAT = "mlx-redrafter-chat"
VERSION = 1
_DRAFT = DraftOptions()


@dataclass
class Totals:
    """The sums over the answers of a session."""

    answers: int = 0
    emitted: int = 0
    steps: int = 0
    decode_s: float = 0.0

    def count(self, stats: GenerationStats) -> None:
        self.answers += 1
        self.emitted += stats.emitted
        self.steps += stats.steps
        self.decode_s += stats.decode_s

    @property
    def tokens_per_step(self) -> float | None:
        return (self.emitted - self.answers) / self.steps if self.steps else None

    @property
    def tokens_per_second(self) -> float | None:
        return (self.emitted - self.answers) / self.decode_s if self.decode_s > 0 else None


class Chat:
    """A conversation with a model. ``ask`` and ``retry`` give a Reply, which is to be iterated.

    ``messages`` are the user's and the assistant's, in turn. ``first`` is the index of the first
    one that the model still gets: when the context is full, the oldest turns are left out, the
    system prompt never.
    """

    def __init__(
        self,
        pair: ModelPair,
        *,
        system_prompt: str | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        temperature: float = SamplingOptions.temperature,
        seed: int | None = None,
        draft: DraftOptions | None = _DRAFT,
        chat_template_config: dict[str, Any] | None = None,
    ) -> None:
        SamplingOptions(temperature, seed or 0)  # refuses what cannot be used, before any turn
        self.pair = pair
        self.system_prompt = system_prompt
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.seed = seed
        self.draft = draft
        self.chat_template_config = chat_template_config
        self.cache = PromptCache()
        self.reset()

    def reset(self) -> None:
        """Forget the conversation; the system prompt and the options stay."""
        self.messages: list[Message] = []
        self.first = 0
        self.stats: GenerationStats | None = None  # of the last answer
        self.finish_reason: FinishReason | None = None
        self.totals = Totals()
        self.cache.clear()
        self._unanswered: str | None = None  # a question stopped before its answer's first word
        self._retries = 0

    @property
    def drafting(self) -> str:
        """The status line's words: "on", or "off (reason)"."""
        return drafting_status(self.pair, self.draft)

    @property
    def context_used(self) -> int:
        """Tokens that the cache holds."""
        return len(self.cache.tokens)

    def ask(self, text: str) -> Reply:
        """The reply to the next message. Nothing changes until it is iterated."""
        return self._reply(text, len(self.messages), self._retries)

    def retry(self) -> Reply:
        """The reply to the last message once more: with another seed, or with other options.

        Also after an answer that was stopped before its first word.
        """
        if self._unanswered is not None:
            return self._reply(self._unanswered, len(self.messages), self._retries + 1)
        if not self.messages:
            raise InputError("there is nothing to answer again: ask something first.")
        last = len(self.messages) - 2
        return self._reply(self.messages[last]["content"], last, self._retries + 1)

    def _reply(self, text: str, position: int, retries: int) -> Reply:
        if not text.strip():
            raise InputError("the message is empty.")
        messages = [*self.messages[:position], {"role": "user", "content": text}]
        prompt, first = self._fit(messages)
        # With a seed of the user's, the same conversation gives the same answers.
        seed = secrets.randbits(32) if self.seed is None else (self.seed + retries) % 2**64
        return Reply(
            chat=self,
            messages=messages,
            first=first,
            dropped_turns=(first - min(self.first, position)) // 2,
            prompt=prompt,
            sampling=SamplingOptions(self.temperature, seed),
            retries=retries,
        )

    def _fit(self, messages: list[Message]) -> tuple[list[int], int]:
        """The prompt, and the index of its first message: the oldest turns go until it fits.

        Room is kept for an answer (max_tokens, but at most a quarter of the context). Where turns
        must go, another quarter is cleared with them: each cut changes the beginning of the
        prompt, and so costs a prefill of all of it.
        """
        context = self.pair.context_length
        quarter = context // 4
        limit = context - (quarter if self.max_tokens == -1 else min(self.max_tokens, quarter))
        first = min(self.first, len(messages) - 1)
        prompt = self._encode(messages[first:])
        if len(prompt) > limit:
            while len(prompt) > limit - quarter and first < len(messages) - 1:
                first += 2
                prompt = self._encode(messages[first:])
        if len(prompt) >= context:
            raise InputError(
                f"the message, with the system prompt, has {len(prompt)} tokens and leaves no room "
                f"for an answer in the model's context of {context}: shorten it."
            )
        return prompt, first

    def _encode(self, messages: list[Message]) -> list[int]:
        return encode_prompt(
            self.pair,
            messages,
            system_prompt=self.system_prompt,
            chat_template_config=self.chat_template_config,
        )

    def save(self, path: str | Path) -> Path:
        """Write the conversation as JSON: the whole file, or none.

        Refuses to replace a file that is no saved conversation.
        """
        path = _path(path)
        if path.exists():
            try:
                _read(path)
            except FormatError as error:
                raise InputError(
                    f"{path} is there and is no saved conversation: choose another name."
                ) from error
        content = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.pair.name,
            "system_prompt": self.system_prompt,
            "messages": self.messages,
        }
        try:
            _write_whole(path, json.dumps(content, ensure_ascii=False, indent=2) + "\n")
        except OSError as error:
            raise RedrafterError(
                f"cannot write {path} ({error.strerror or error}): choose another place."
            ) from error
        return path

    def load(self, path: str | Path) -> str:
        """Go on with a saved conversation. Returns the name of the model that it was held with."""
        content = _read(_path(path))
        self.reset()
        self.messages = content["messages"]
        self.system_prompt = content["system_prompt"]
        name: str = content["model"]
        return name


@dataclass
class Reply:
    """One answer under way; iterate it for its segments.

    The question and the answer join the conversation once there is text. An answer that is stopped
    after that is kept as far as it got; one that is stopped or fails before leaves no trace.
    """

    chat: Chat
    messages: list[Message]
    first: int
    dropped_turns: int
    prompt: list[int]
    sampling: SamplingOptions
    retries: int
    text: str = ""
    finish_reason: FinishReason | None = None
    stats: GenerationStats | None = None
    _cancelled: bool = field(default=False, repr=False)

    @property
    def starts_thinking(self) -> bool:
        """Whether the template has opened the model's thinking already."""
        tokenizer = self.chat.pair.tokenizer
        if not tokenizer.has_thinking:
            return False
        tail = self.prompt[-64:]
        start: int = tokenizer.rfind_think_start(tail)
        return start >= 0 and start > tokenizer.rfind_think_end(tail)

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """End the answer after the step under way."""
        self._cancelled = True

    def __iter__(self) -> Iterator[Segment]:
        chat = self.chat
        segments = stream_generate(
            chat.pair,
            self.prompt,
            max_tokens=chat.max_tokens,
            sampling=self.sampling,
            draft=chat.draft,
            cache=chat.cache,
            cancelled=lambda: self._cancelled,
        )
        answer: Message = {"role": "assistant", "content": ""}
        question = self.messages[-1]["content"]
        before = chat.messages, chat.first
        chat._unanswered, chat._retries = question, self.retries
        chat.messages, chat.first = [*self.messages, answer], self.first
        try:
            for segment in segments:
                self.text += segment.text
                if segment.stats is not None:
                    self.finish_reason, self.stats = segment.finish_reason, segment.stats
                    chat.finish_reason, chat.stats = segment.finish_reason, segment.stats
                    chat.totals.count(segment.stats)
                yield segment
        finally:
            # Half a character would stay in the model's view of the conversation.
            answer["content"] = self.text.rstrip(REPLACEMENT)
            ended = self.finish_reason in ("stop", "length")  # also an answer without a word
            if not (self.text or ended):
                chat.messages, chat.first = before
            if self.text or ended or len(chat.messages) >= len(self.messages):
                chat._unanswered = None  # the last turn has an answer, maybe the one before


def _path(path: str | Path) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # no such user
        raise InputError(f"{path} names no place: {error}.") from error


def _read(path: Path) -> dict[str, Any]:
    """A saved conversation, checked. FormatError says what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror or error}).") from error
    except (ValueError, RecursionError) as error:  # neither JSON nor UTF-8
        raise FormatError(f"{path} is no saved conversation: it is not JSON.") from error
    wrong = _fault(content)
    if wrong is not None:
        raise FormatError(f"{path} is no saved conversation: {wrong}.")
    checked: dict[str, Any] = content
    return checked


def _fault(content: Any) -> str | None:
    """What keeps ``content`` from being a saved conversation; None where nothing does."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return f'its "format" is not "{FORMAT}"'
    if content.get("version") != VERSION:
        return f'its "version" is {content.get("version")!r}, and this program reads {VERSION}'
    if not isinstance(content.get("model"), str):
        return 'its "model" is no text'
    system = content.get("system_prompt")
    if system is not None and not _is_text(system):
        return 'its "system_prompt" is no text'
    messages = content.get("messages")
    if not isinstance(messages, list) or len(messages) % 2:
        return 'its "messages" are no list of questions and answers'
    for index, message in enumerate(messages):
        role = ("user", "assistant")[index % 2]
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            return f'message {index} needs "role" and "content", and nothing else'
        if message["role"] != role:
            return f"message {index} is not from the {role}"
        if not _is_text(message["content"]):
            return f"message {index} is no text"
    return None


def _is_text(value: Any) -> bool:
    """JSON can spell half a character pair, which is no text and cannot be encoded."""
    if not isinstance(value, str):
        return False
    with suppress(UnicodeEncodeError):
        value.encode()
        return True
    return False


def _write_whole(path: Path, text: str) -> None:
    """Replace ``path`` at once, readable by its owner only."""
    path = path.resolve()
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


class Thinking:
    """Tells a reasoning model's thinking from its answer, in a stream of text.

    Thinking comes first and once; its tags belong to it. Text that may be the beginning of a tag
    is held back.
    """

    def __init__(self, start: str | None, end: str | None, inside: bool = False) -> None:
        self._start, self._end = start or "<think>", end or "</think>"
        self._inside = inside
        self._over = False
        self._held = ""

    def feed(self, text: str) -> list[tuple[str, bool]]:
        """Parts of the text, each with whether it is thinking."""
        text, self._held = self._held + text, ""
        parts: list[tuple[str, bool]] = []
        if not self._inside and not self._over:
            blank = len(text) - len(text.lstrip())
            if text.startswith(self._start, blank):
                parts.append((text[:blank], False))
                text, self._inside = text[blank:], True
            elif self._start.startswith(text[blank:]):
                self._held, text = text, ""
            else:
                self._over = True
        if self._inside:
            place = text.find(self._end)
            if place >= 0:
                cut = place + len(self._end)
                self._inside, self._over = False, True
            else:
                cut = len(text) - _overlap(text, self._end)
                self._held = text[cut:]
            parts.append((text[:cut], True))
            text = "" if self._inside else text[cut:]
        parts.append((text, False))
        return [part for part in parts if part[0]]

    def finish(self) -> list[tuple[str, bool]]:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return [(held, self._inside)] if held else []


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that ``tag`` begins with, but for the whole tag."""
    return next(n for n in range(len(tag) - 1, -1, -1) if text.endswith(tag[:n]))
