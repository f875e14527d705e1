"""`mlx-redrafter chat`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mlx_redrafter.chat import Chat, Reply, Thinking
from mlx_redrafter.cli import common
from mlx_redrafter.decoding.options import DraftOptions, SamplingOptions
from mlx_redrafter.errors import InputError, RedrafterError
from mlx_redrafter.generate import DEFAULT_MAX_TOKENS, check_limits
from mlx_redrafter.machine import paths

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History

_KEYS = """
Enter sends. A line break is Alt-Enter (or Esc, then Enter) or Ctrl-J; pasted text may have any.
Up and down: earlier messages. Ctrl-C stops an answer and keeps what was said. Ctrl-D leaves.
A message that begins with / is written with //."""


def chat(
    model: common.ModelOption = None,
    drafter: common.DrafterOption = None,
    dtype: common.DtypeOption = None,
    adapter_path: common.AdapterOption = None,
    max_tokens: common.MaxTokensOption = DEFAULT_MAX_TOKENS,
    temp: common.TempOption = SamplingOptions.temperature,
    seed: common.SeedOption = None,
    system_prompt: common.SystemPromptOption = None,
    beam_width: common.BeamWidthOption = None,
    beam_length: common.BeamLengthOption = None,
    token_budget: common.TokenBudgetOption = None,
    no_draft: common.NoDraftOption = False,
    show_accepted: Annotated[
        bool, typer.Option("--show-accepted", help="Colour the tokens that were drafted.")
    ] = False,
    chat_template_config: common.TemplateConfigOption = None,
) -> None:
    """Talk with a model. /help lists what can be said besides messages.

    Where stdin is no terminal, each line of it is a message and each answer ends with a line
    break; nothing else is written to stdout.
    """
    draft = common.draft_options(no_draft, drafter, beam_width, beam_length, token_budget)
    config = common.template_config(chat_template_config)
    check_limits(max_tokens)
    if temp == 0 and seed is not None:
        common.note("--seed has no effect at temperature 0.")
    SamplingOptions(temp, seed or 0)  # refuses what cannot be used, before the model is loaded
    interactive = sys.stdin is not None and sys.stdin.isatty()
    style = Style.for_terminal(interactive, show_accepted)
    common.prepare_stdout()
    conversation = Chat(
        common.load_pair(model, drafter, dtype, adapter_path),
        system_prompt=system_prompt,
        max_tokens=max_tokens,
        temperature=temp,
        seed=seed,
        draft=draft,
        chat_template_config=config,
    )
    repl = Repl(conversation, style, interactive, draft or DraftOptions())
    if interactive:
        _run_interactive(repl)
    elif not _run_piped(repl):
        raise typer.Exit(2)


@dataclass(frozen=True)
class Style:
    """How text is written: escape codes only where a terminal shows them."""

    colours: bool = False
    accepted: bool = False
    control_pictures: bool = False

    @classmethod
    def for_terminal(cls, interactive: bool, show_accepted: bool) -> Style:
        terminal = interactive and sys.stdout.isatty()
        why = None
        if not terminal:
            why = "stdin or stdout is no terminal"
        elif os.environ.get("NO_COLOR"):
            why = "NO_COLOR is set"
        elif os.environ.get("TERM") == "dumb":
            why = "this terminal has no colours"
        if show_accepted and why is not None:
            common.note(f"--show-accepted has no effect: {why}.")
        return cls(why is None, show_accepted and why is None, terminal)

    def __call__(self, text: str, *, drafted: bool = False, dim: bool = False) -> str:
        if self.control_pictures:
            text = text.translate(_CONTROLS)
        codes = [code for code, on in (("2", dim), ("32", drafted and self.accepted)) if on]
        if not (self.colours and codes):
            return text
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m"


# What a model writes must not steer the terminal.
_CONTROLS = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0x7F, 0xA0), 0xFFFD),
}


class Command(NamedTuple):
    usage: str
    help: str
    run: Callable[[Repl, str], None]
    takes_text: bool = False


class _Leave(Exception):
    """/exit."""


class Repl:
    """Takes messages and commands, one at a time; answers to stdout, all else to stderr."""

    def __init__(self, chat: Chat, style: Style, interactive: bool, draft: DraftOptions) -> None:
        self.chat = chat
        self.style = style
        self.interactive = interactive
        self.draft = draft  # what /draft on turns on

    @property
    def status(self) -> str:
        return f"{self.chat.pair.name} \u00b7 drafting: {self.chat.drafting}"

    def take(self, line: str) -> None:
        """Answer a message or do a command. Raises InputError for what is neither."""
        text = line.strip()
        if not text:
            return
        if text.startswith("//"):
            self.answer(self.chat.ask(line.replace("/", "", 1)))
        elif text.startswith("/"):
            self._command(text)
        else:
            self.answer(self.chat.ask(line))

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        command = COMMANDS.get(name)
        if command is None:
            raise InputError(
                f"{name} is no command: /help lists them; // begins a message with a /."
            )
        if rest and not command.takes_text:
            raise InputError(f"{name} takes nothing after it.")
        command.run(self, rest)

    def answer(self, reply: Reply) -> None:
        context = self.chat.pair.context_length
        if reply.dropped_turns:
            turns = "turn is" if reply.dropped_turns == 1 else f"{reply.dropped_turns} turns are"
            common.note(
                f"The context of {context} tokens is full: the oldest {turns} left out from here "
                "on; the system prompt stays."
            )
        tokenizer = self.chat.pair.tokenizer
        thinking = Thinking(tokenizer.think_start, tokenizer.think_end, reply.starts_thinking)
        begun = drafted = False
        try:
            with _stoppable(reply) if self.interactive else _unstoppable(reply) as segments:
                for segment in segments:
                    begun = True
                    for piece in segment.pieces:
                        drafted = piece.drafted
                        self._write(thinking.feed(piece.text), drafted)
                    sys.stdout.flush()
        finally:
            if begun:
                self._write(thinking.finish(), drafted)
                print(flush=True)
        if reply.finish_reason == "cancelled":
            common.note("(stopped)")
        elif reply.finish_reason == "length":
            assert reply.stats is not None
            used = reply.stats.prompt_tokens + reply.stats.emitted
            why = "the context is full" if used >= context else "cut at --max-tokens"
            common.note(f"({why})")

    def _write(self, parts: list[tuple[str, bool]], drafted: bool) -> None:
        for text, thinking in parts:
            sys.stdout.write(self.style(text, drafted=drafted, dim=thinking))

    def help(self, _: str) -> None:
        width = max(len(command.usage) for command in COMMANDS.values())
        for command in dict.fromkeys(COMMANDS.values()):
            common.note(f"{command.usage.ljust(width)}  {command.help}")
        common.note(_KEYS.strip("\n"))

    def reset(self, _: str) -> None:
        self.chat.reset()
        common.note("The conversation begins anew; the system prompt stays.")

    def retry(self, _: str) -> None:
        self.answer(self.chat.retry())

    def system(self, text: str) -> None:
        if text:
            self.chat.system_prompt = None if text == "-" else text
        prompt = self.chat.system_prompt
        common.note("No system prompt." if prompt is None else f"System prompt: {prompt}")

    def save(self, name: str) -> None:
        path = self.chat.save(_file(name, "/save"))
        common.note(f"Saved to {path}.")

    def load(self, name: str) -> None:
        model = self.chat.load(_file(name, "/load"))
        turns = len(self.chat.messages) // 2
        common.note(f"Loaded {turns} turn{'' if turns == 1 else 's'}.")
        if model != self.chat.pair.name:
            common.note(f"It was held with {model}; {self.chat.pair.name} goes on.")

    def set_draft(self, text: str) -> None:
        if text not in ("", "on", "off"):
            raise InputError("/draft takes on or off.")
        if text:
            self.chat.draft = self.draft if text == "on" else None
        common.note(f"drafting: {self.chat.drafting}")

    def stats(self, _: str) -> None:
        chat = self.chat
        if chat.stats is None:
            common.note("No answer yet.")
        else:
            for line in common.details(chat.stats, chat.finish_reason or "", chat.draft):
                common.note(line)
            common.note(common.session_line(chat.totals))
        common.note(
            f"context: {chat.context_used} of {chat.pair.context_length} tokens, "
            f"{(len(chat.messages) - chat.first) // 2} of {len(chat.messages) // 2} turns"
        )

    def leave(self, _: str) -> None:
        raise _Leave


_EXIT = Command("/exit", "Leave; so does Ctrl-D.", Repl.leave)
COMMANDS = {
    "/help": Command("/help", "Show this.", Repl.help),
    "/reset": Command("/reset", "Forget the conversation.", Repl.reset),
    "/retry": Command("/retry", "Answer the last message once more.", Repl.retry),
    "/system": Command(
        "/system [TEXT]", "Show or set the system prompt; - for none.", Repl.system, True
    ),
    "/draft": Command(
        "/draft [on|off]", "Show or switch drafting; the text stays the same.", Repl.set_draft, True
    ),
    "/stats": Command("/stats", "Figures of the last answer and of the session.", Repl.stats),
    "/save": Command("/save FILE", "Write the conversation to a file.", Repl.save, True),
    "/load": Command("/load FILE", "Go on with a saved conversation.", Repl.load, True),
    "/exit": _EXIT,
    "/quit": _EXIT,
}


def _file(name: str, command: str) -> str:
    if len(name) > 1 and name[0] == name[-1] and name[0] in "'\"":
        name = name[1:-1]
    if not name:
        raise InputError(f"{command} needs the name of a file.")
    return name


@contextmanager
def _unstoppable(reply: Reply) -> Iterator[Iterator[Any]]:
    yield iter(reply)


@contextmanager
def _stoppable(reply: Reply) -> Iterator[Iterator[Any]]:
    """Ctrl-C ends the answer after the step under way, so that nothing is torn apart.

    Before the first token (a long prefill), and when pressed once more, it interrupts at once.
    """
    started = False

    def segments() -> Iterator[Any]:
        nonlocal started
        for segment in reply:
            started = True
            yield segment

    def stop(*_: Any) -> None:
        if not started or reply.cancelled:
            raise KeyboardInterrupt
        reply.cancel()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield segments()
    finally:
        signal.signal(signal.SIGINT, before)


def _run_piped(repl: Repl) -> bool:
    """Answer each line of stdin. False if one of them could not be used."""
    common.note(repl.status)
    good = True
    lines = sys.stdin.buffer if sys.stdin is not None else []
    for number, line in enumerate(lines, 1):
        try:
            repl.take(common.decode_utf8(line, f"line {number} of stdin").rstrip("\r\n"))
        except _Leave:
            break
        except RedrafterError as error:
            common.note(f"error: line {number}: {error}")
            good = False
    return good


def _run_interactive(repl: Repl) -> None:
    common.note(f"{repl.status} \u00b7 /help for help")
    session = _session(repl)
    while True:
        try:
            line = session.prompt("> ")
        except KeyboardInterrupt:
            common.note("Ctrl-D or /exit leaves.")
            continue
        except EOFError:
            break
        try:
            repl.take(line)
        except _Leave:
            break
        except KeyboardInterrupt:
            common.note("(stopped)")
        except RedrafterError as error:
            common.note(f"error: {error}")


def _session(repl: Repl) -> PromptSession[str]:
    """Line editing, history and paste. The prompt is drawn where there is a terminal."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _break_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    def toolbar() -> str:
        totals, chat = repl.chat.totals, repl.chat
        parts = [repl.status, f"context {chat.context_used}/{chat.pair.context_length}"]
        if totals.tokens_per_step is not None and chat.drafting == "on":
            parts.append(f"{totals.tokens_per_step:.2f} tokens per step")
        if totals.tokens_per_second is not None:
            parts.append(f"{totals.tokens_per_second:.1f} tokens/s")
        return " \u00b7 ".join(parts)

    return PromptSession(
        history=_history(paths.home() / "chat_history"),
        multiline=True,
        key_bindings=keys,
        completer=WordCompleter(list(COMMANDS), sentence=True),
        complete_while_typing=False,
        prompt_continuation="  ",
        bottom_toolbar=toolbar,
        output=create_output(always_prefer_tty=True),
    )


def _history(path: Path) -> History:
    """The history file, readable by its owner only; in memory where it cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        common.note(f"no history is kept: {path} cannot be written ({error.strerror}).")
        return InMemoryHistory()
    return FileHistory(str(path))
