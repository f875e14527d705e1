"""`chat`: commands, pipes, colours, Ctrl-C. The terminal itself is tested in a terminal."""

import io
import json
import os
import signal
import sys

import pytest

from mlx_redrafter.chat import Chat
from mlx_redrafter.cli.chat import COMMANDS, Repl, Style, _history, _Leave
from mlx_redrafter.decoding.options import DraftOptions
from mlx_redrafter.errors import InputError
from tests.fakes import byte_level, fake_pair, play, script


def says(tokenizer, text, sizes=(3,)):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return script([*tokens, tokenizer.eos_token_id], sizes)


# --- through a pipe


def test_each_line_is_answered_and_nothing_else_is_on_stdout(monkeypatch, run, tokenizer):
    made = play(monkeypatch, says(tokenizer, "one"), says(tokenizer, "t\u4f60\nwo"))
    result = run("chat", stdin="first s\u00fc\r\n\n  \nsecond".encode())
    assert (result.code, result.out) == (0, "one\nt\u4f60\nwo\n")
    assert result.err == "fake · drafting: on\n"
    prompt = tokenizer.decode(made[1].request.prompt)
    assert "user\nfirst s\u00fc<|im_end|>" in prompt
    assert "assistant\none<|im_end|>\n<|im_start|>user\nsecond<|im_end|>" in prompt


def test_no_line_no_answer(run):
    assert run("chat", stdin=b"").out == ""


def test_commands_work_in_a_pipe_too(monkeypatch, run, tokenizer, tmp_path):
    made = play(monkeypatch, *(says(tokenizer, word) for word in ("one", "two", "three")))
    path = tmp_path / "a talk.json"
    lines = [
        "x",
        "/system be brief",
        "/draft off",
        "/retry",
        f"/save {path}",
        "/reset",
        f'/load "{path}"',
        "/draft on",
        "//y",
        "/exit",
        "never",
    ]
    result = run("chat", stdin="\n".join(lines).encode())
    assert (result.code, result.out) == (0, "one\ntwo\nthree\n")
    assert [decoder.request.draft for decoder in made] == [DraftOptions(), None, DraftOptions()]
    prompt = tokenizer.decode(made[2].request.prompt)
    assert "system\nbe brief<" in prompt
    assert "user\nx<|im_end|>\n<|im_start|>assistant\ntwo<" in prompt
    assert "user\n/y<|im_end|>" in prompt
    assert json.loads(path.read_text())["messages"][1]["content"] == "two"
    for told in ("System prompt: be brief", "drafting: off", "Saved to", "Loaded 1 turn.", "anew"):
        assert told in result.err


def test_what_cannot_be_used_is_told_and_the_rest_goes_on(monkeypatch, run, tokenizer):
    play(monkeypatch, says(tokenizer, "one"))
    data = b"/nonsense\n/reset now\n/draft maybe\n/save\n/load nowhere\n\xff\n/retry\nx\n"
    result = run("chat", stdin=data)
    assert (result.code, result.out) == (2, "one\n")
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert [error.split(":")[1] for error in errors] == [f" line {n}" for n in range(1, 8)]
    assert "/nonsense is no command: /help lists them" in errors[0]
    assert "not UTF-8 at byte 0" in errors[5]


def test_options_reach_the_conversation(monkeypatch, run, tokenizer):
    made = play(monkeypatch, says(tokenizer, "abcdef"))
    args = ("--temp", "0.5", "--seed", "9", "-m", "2", "--system-prompt", "be brief", "--no-draft")
    result = run("chat", *args, "--chat-template-config", '{"prefix": "Well"}', stdin=b"x\n")
    assert result.out == "ab\n"
    assert "(cut at --max-tokens)" in result.err
    request = made[0].request
    assert (request.sampling.temperature, request.sampling.seed, request.draft) == (0.5, 9, None)
    assert tokenizer.decode(request.prompt).startswith("<|im_start|>system\nbe brief")
    assert tokenizer.decode(request.prompt).endswith("Well")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-m", "0"], "max_tokens is 0"),
        (["--no-draft", "--beam-width", "2"], "--beam-width cannot go with --no-draft"),
        (["--temp", "-1"], "temperature is -1"),
        (["--seed", "-1", "--temp", "1"], "seed is -1"),
        (["--chat-template-config", "x"], "not JSON"),
    ],
)
def test_what_cannot_be_is_told_before_the_model_is_loaded(run, args, message):
    result = run("chat", *args, stdin=b"x\n")
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert not run.loaded


def test_a_full_context_is_told_before_it_is_cut(monkeypatch, run, pair, tokenizer):
    pair.context_length = 160
    play(monkeypatch, *(says(tokenizer, "okay") for _ in range(20)))
    result = run("chat", "-m", "20", stdin=b"hello there\n" * 20)
    assert result.out == "okay\n" * 20
    assert "is full: the oldest" in result.err
    assert "the system prompt stays" in result.err


def test_the_end_of_the_context_is_told(monkeypatch, run, pair, tokenizer):
    pair.context_length = 40
    play(monkeypatch, says(tokenizer, "x" * 100))
    result = run("chat", stdin=b"hello\n")
    assert result.err.endswith("(the context is full)\n")


def test_ctrl_c_in_a_pipe_ends_the_program(monkeypatch, run, tokenizer):
    def interrupt(name):
        if name == "step":
            raise KeyboardInterrupt

    played = says(tokenizer, "abc")
    played.before = interrupt
    play(monkeypatch, played)
    result = run("chat", stdin=b"x\ny\n")
    assert (result.code, result.out) == (130, "a\n")


# --- commands


def repl(pair, style=None, interactive=False, **options):
    return Repl(Chat(pair, **options), style or Style(), interactive, DraftOptions())


def test_help_tells_every_command(pair, capsys):
    repl(pair).take("/help")
    out, err = capsys.readouterr()
    assert out == ""
    for command in COMMANDS.values():
        assert command.usage in err
        assert command.help in err
    assert "Ctrl-J" in err


def test_the_commands_of_the_manual_are_there():
    wanted = "/help /reset /system /retry /save /load /stats /draft /exit"
    assert set(wanted.split()) <= set(COMMANDS)
    for name in ("/exit", "/quit"):
        with pytest.raises(_Leave):
            repl(fake_pair(byte_level())).take(name)


def test_system_shows_sets_and_removes(pair, capsys):
    one = repl(pair)
    told = []
    for line in ("/system", "/system be brief ", "/system", "/system -"):
        one.take(line)
        told.append(capsys.readouterr().err)
    assert told[0] == told[3] == "No system prompt.\n"
    assert told[1] == told[2] == "System prompt: be brief\n"


def test_draft_tells_why_it_stays_off(pair, capsys):
    pair.drafter, pair.drafting_reason = None, "no drafter is known for fake"
    repl(pair).take("/draft on")
    assert capsys.readouterr().err == "drafting: off (no drafter is known for fake)\n"


def test_stats_of_the_answer_and_the_session(monkeypatch, pair, tokenizer, capsys):
    play(monkeypatch, says(tokenizer, "one"), says(tokenizer, "two"))
    one = repl(pair)
    one.take("/stats")
    assert "No answer yet." in capsys.readouterr().err
    one.take("x")
    one.take("y")
    one.take("/stats")
    err = capsys.readouterr().err
    assert "kept from before" in err
    assert "session: 2 answers" in err
    assert "of 10000 tokens, 2 of 2 turns" in err


def test_a_conversation_of_another_model_is_told(monkeypatch, pair, tokenizer, tmp_path, capsys):
    play(monkeypatch, says(tokenizer, "one"))
    other = fake_pair(tokenizer, name="other")
    one = repl(other)
    one.take("x")
    one.take(f"/save {tmp_path / 'talk'}")
    repl(pair).take(f"/load {tmp_path / 'talk'}")
    assert "It was held with other; fake goes on." in capsys.readouterr().err


def test_lines_that_are_nothing_are_nothing(pair, capsys):
    repl(pair).take("  \n ")
    assert capsys.readouterr() == ("", "")
    with pytest.raises(InputError):
        repl(pair).take("/usr/bin is what?")


# --- colours


def test_drafted_and_thinking_text_in_a_terminal(monkeypatch, tokenizer, capsys):
    pair = fake_pair(byte_level(extra=["<think>", "</think>"]))
    play(monkeypatch, says(pair.tokenizer, "<think>ab</think>cdef", (3,)))
    one = repl(pair, Style(colours=True, accepted=True, control_pictures=True))
    one.take("x")
    out = capsys.readouterr().out
    assert out.startswith("\x1b[2m<think>\x1b[0m\x1b[2;32ma\x1b[0m\x1b[2;32mb\x1b[0m")
    assert "\x1b[2m</think>\x1b[0m" in out
    assert "\x1b[32mc\x1b[0m" in out


def test_what_might_have_been_a_tag_is_written_at_the_end(monkeypatch, run, tokenizer):
    play(monkeypatch, says(tokenizer, " <thin"))
    assert run("chat", stdin=b"x\n").out == " <thin\n"


def test_a_model_cannot_steer_the_terminal():
    style = Style(control_pictures=True)
    assert style("a\x1b[2Jb\r\x9b\n\tc\x7f") == "a\u241b[2Jb\u240d\ufffd\n\tc\ufffd"
    assert Style()("a\x1b[2J") == "a\x1b[2J"  # a pipe gets what was said


@pytest.mark.parametrize(
    ("stdin", "stdout", "environment", "colours"),
    [
        (True, True, {}, True),
        (True, True, {"NO_COLOR": ""}, True),
        (True, True, {"NO_COLOR": "1"}, False),
        (True, True, {"TERM": "dumb"}, False),
        (True, False, {}, False),
        (False, True, {}, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    monkeypatch, capsys, stdin, stdout, environment, colours
):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: stdout, raising=False)
    style = Style.for_terminal(stdin, show_accepted=True)
    assert (style.colours, style.accepted) == (colours, colours)
    assert ("--show-accepted has no effect" in capsys.readouterr().err) == (not colours)
    assert not Style.for_terminal(stdin, show_accepted=False).accepted


def test_show_accepted_in_a_pipe_is_told(monkeypatch, run, tokenizer):
    play(monkeypatch, says(tokenizer, "abcd"))
    result = run("chat", "--show-accepted", stdin=b"x\n")
    assert result.out == "abcd\n"
    assert "--show-accepted has no effect" in result.err


# --- Ctrl-C and the history


def interrupting(played, where, times):
    calls = []

    def press(name):
        calls.append(name)
        if calls.count(where) in times and name == where:
            os.kill(os.getpid(), signal.SIGINT)

    played.before = press
    return played


def test_ctrl_c_stops_the_answer_and_keeps_the_session(monkeypatch, pair, tokenizer, capsys):
    played = interrupting(says(tokenizer, "abcdefghij", (2,)), "step", {2})
    made = play(monkeypatch, played, says(tokenizer, "two"))
    one = repl(pair, interactive=True)
    before = signal.getsignal(signal.SIGINT)
    one.take("x")
    assert signal.getsignal(signal.SIGINT) is before
    assert capsys.readouterr() == ("abcde\n", "(stopped)\n")  # the step under way is finished
    assert one.chat.messages[1]["content"] == "abcde"
    assert not made[0].cache.unsettled
    one.take("y")
    assert "assistant\nabcde<|im_end|>" in tokenizer.decode(made[1].request.prompt)
    assert tokenizer.decode(made[1].prefilled).startswith("e<|im_end|>")


@pytest.mark.parametrize(("where", "times"), [("start", {1}), ("step", {2, 3})])
def test_ctrl_c_before_the_first_word_or_twice_does_not_wait(
    monkeypatch, pair, tokenizer, where, times
):
    played = interrupting(says(tokenizer, "abcdefghij", (2,)), where, times)
    if where == "step":

        def press(name, press=played.before):
            press(name)
            if name == "step" and len(made[0].commits) == 1:
                press(name)  # within the same step

        played.before = press
    made = play(monkeypatch, played)
    with pytest.raises(KeyboardInterrupt):
        repl(pair, interactive=True).take("x")


def test_the_history_is_the_owners_alone(tmp_path, capsys):
    path = tmp_path / "home" / "chat_history"
    history = _history(path)
    history.append_string("hello\nthere")
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(_history(path).load_history_strings()) == ["hello\nthere"]
    assert list(_history(path / "below").load_history_strings()) == []
    assert "no history is kept" in capsys.readouterr().err


def test_the_status_line_is_the_same_in_a_narrow_encoding(monkeypatch, run, tokenizer):
    """A terminal that cannot show a character gets a question mark."""
    play(monkeypatch, says(tokenizer, "a\u4f60"))
    buffer = io.BytesIO()
    narrow = io.TextIOWrapper(buffer, encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", narrow)
    run("chat", stdin=b"x\n")
    assert buffer.getvalue() == b"a?\n"
