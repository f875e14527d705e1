"""`generate`: what goes where, and what is refused."""

import json
import os
import re

import pytest

from mlx_redrafter.cli import common
from mlx_redrafter.decoding.options import DraftOptions
from tests.fakes import play, script


def says(tokenizer, text, sizes=(3,)):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return script([*tokens, tokenizer.eos_token_id], sizes)


def test_text_goes_to_stdout_and_one_status_line_to_stderr(monkeypatch, run, tokenizer):
    made = play(monkeypatch, says(tokenizer, "one\u4f60 two"))
    result = run("generate", "--prompt", "hi")
    assert result.code == 0
    assert result.out == "one\u4f60 two\n"
    assert re.fullmatch(
        r"drafting: on · \d+ tokens · \d\.\d\d tokens per step · [\d.]+ tokens/s\n", result.err
    )
    assert "user\nhi<|im_end|>" in tokenizer.decode(made[0].request.prompt)


def test_json_is_one_object_and_nothing_else(monkeypatch, run, tokenizer):
    play(monkeypatch, says(tokenizer, "one\u4f60\n two"), says(tokenizer, "x"))
    result = run("generate", "-p", "hi", "--json")
    assert result.err == ""
    assert result.out.count("\n") == 1
    content = json.loads(result.out)
    assert list(content) == ["text", "tokens", "finish_reason", "stats"]
    assert content["text"] == tokenizer.decode(content["tokens"]) == "one\u4f60\n two"
    assert content["finish_reason"] == "stop"
    assert content["stats"]["emitted"] == len(content["tokens"]) + 1
    result = run("generate", "-p", "hi", "--json", "--verbose")
    assert json.loads(result.out)["text"] == "x"
    assert "drafting: on" in result.err


def test_verbose_shows_all_figures(monkeypatch, run, tokenizer):
    play(monkeypatch, says(tokenizer, "abcdefghijk", (4, 2)))
    options = ("--verbose", "--temp", "0.5", "--seed", "7", "--token-budget", "2")
    result = run("generate", "-p", "hi", *options)
    for part in ("prompt: ", "first token after ", "ended: stop", "tokens per step", "tokens/s"):
        assert part in result.err
    assert re.search(r"drafted tokens accepted: .*1: \d+ %, .*3: \d+ % of the steps", result.err)
    assert "drafting: on (beam_width 1, beam_length 2, token_budget 2)" in result.err
    assert "temperature: 0.5, seed 7" in result.err


def test_the_prompt_from_stdin(monkeypatch, run, tokenizer):
    made = play(monkeypatch, *(says(tokenizer, "x") for _ in range(4)))
    text = " s\u00fc\U0001f600\n\nb"
    for data in (f"{text}\n".encode(), text.encode(), f"{text}\r\n".encode()):
        assert run("generate", "-p", "-", stdin=b"\xef\xbb\xbf" + data).code == 0
        assert f"user\n{text}<|im_end|>" in tokenizer.decode(made[-1].request.prompt)
    run("generate", "-p", "-", stdin=b"a\n\n")
    assert "user\na\n<|im_end|>" in tokenizer.decode(made[-1].request.prompt)


@pytest.mark.parametrize("data", [b"", b"\n", b"  \r\n"])
def test_an_empty_stdin_is_told(run, data):
    result = run("generate", "-p", "-", stdin=data)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: stdin is empty")
    assert not run.loaded


def test_bytes_that_are_no_text_are_told(run):
    result = run("generate", "-p", "-", stdin=b"abc\xff")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: stdin is not UTF-8 at byte 3")
    result = run("generate", "-p", os.fsdecode(b"abc\xff"))
    assert (result.code, result.out) == (2, "")
    assert "not valid UTF-8" in result.err


def test_without_options_it_says_hello(monkeypatch, run, tokenizer):
    made = play(monkeypatch, says(tokenizer, "x"))
    assert run("generate").code == 0
    assert "user\nhello<|im_end|>" in tokenizer.decode(made[0].request.prompt)
    assert run.loaded == [{}]
    assert made[0].request.draft == DraftOptions()


def test_a_pipe_that_is_not_read_is_told(monkeypatch, run, tokenizer):
    play(monkeypatch, says(tokenizer, "x"))
    monkeypatch.setattr(common, "stdin_has_text", lambda: True)
    assert "stdin is not read without --prompt -\n" in run("generate").err


def test_options_reach_the_request(monkeypatch, run, tokenizer):
    made = play(monkeypatch, *(says(tokenizer, "abcdefgh", (2,)) for _ in range(4)))
    result = run("generate", "-p", "x", "-m", "3", "--system-prompt", "be brief")
    assert result.out == "abc\n"
    assert "system\nbe brief<|im_end|>" in tokenizer.decode(made[-1].request.prompt)
    result = run("generate", "-p", "x", "--stop", "gh", "--stop", "de")
    assert result.out == "abc\n"
    run("generate", "-p", "x", "--ignore-chat-template", "--no-draft")
    assert tokenizer.decode(made[-1].request.prompt) == "x"
    assert made[-1].request.draft is None
    args = ("--beam-width", "3", "--beam-length", "4", "--token-budget", "9")
    run("generate", "-p", "x", *args, "--chat-template-config", '{"prefix": "Well"}')
    assert made[-1].request.draft == DraftOptions(3, 4, 9)
    assert tokenizer.decode(made[-1].request.prompt).endswith("assistant\nWell")


def test_no_draft_is_told(monkeypatch, run, tokenizer):
    play(monkeypatch, says(tokenizer, "x"), says(tokenizer, "y"))
    assert run("generate", "--no-draft").err.startswith("drafting: off (not asked for) · 2 tokens")
    assert run.loaded == [{"drafter": None}]  # not even loaded
    run("generate", "--model", "m", "--drafter", "d", "--dtype", "4bit")
    assert run.loaded[1] == {"model": "m", "drafter": "d", "dtype": "4bit"}


def test_why_there_is_no_drafting_is_told(monkeypatch, run, pair, tokenizer):
    play(monkeypatch, says(tokenizer, "x"))
    pair.drafter, pair.drafting_reason = None, "no drafter is known for fake"
    assert run("generate").err.startswith("drafting: off (no drafter is known for fake)")


def test_a_seed_is_drawn_and_told(monkeypatch, run, tokenizer):
    made = play(monkeypatch, *(says(tokenizer, "xy") for _ in range(4)))
    seeds = []
    for _ in range(2):
        result = run("generate", "--temp", "0.7", "--json")
        seeds.append(json.loads(result.out)["stats"]["seed"])
        assert seeds[-1] == made[-1].request.sampling.seed
    assert seeds[0] != seeds[1]
    result = run("generate", "--temp", "0.7", "--seed", "5")
    assert result.err.endswith(" · seed 5\n")
    result = run("generate", "--seed", "5")
    assert "--seed has no effect at temperature 0" in result.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-p", ""], "the prompt is empty"),
        (["-p", " "], "the prompt is empty"),
        (["-m", "0"], "max_tokens is 0"),
        (["-m", "-2"], "max_tokens is -2"),
        (["--stop", ""], "stop string is empty"),
        (["--no-draft", "--beam-width", "2"], "--beam-width cannot go with --no-draft"),
        (
            ["--no-draft", "--drafter", "x", "--token-budget", "2"],
            "--drafter, --token-budget cannot",
        ),
        (["--beam-width", "0"], "beam_width is 0"),
        (["--beam-length", "9"], "beam_length is 9"),
        (["--beam-width", "2", "--beam-length", "2", "--token-budget", "5"], "token_budget is 5"),
        (["--temp", "-1"], "temperature is -1"),
        (["--temp", "nan"], "temperature is nan"),
        (["--seed", "-1"], "seed is -1"),
        (["--chat-template-config", "{"], "not JSON"),
        (["--chat-template-config", "[1]"], "must be a JSON object"),
        (["--ignore-chat-template", "--system-prompt", "x"], "no place for --system-prompt"),
        (["--ignore-chat-template", "--chat-template-config", "{}"], "--chat-template-config"),
    ],
)
def test_what_cannot_be_is_told_before_the_model_is_loaded(run, args, message):
    result = run("generate", *args)
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1 + ("--seed has no effect" in result.err)
    assert f"error: {message}" in result.err or message in result.err
    assert not run.loaded


def test_a_prompt_that_does_not_fit_is_told(run, pair):
    pair.context_length = 10
    result = run("generate", "-p", "x" * 50)
    assert result.code == 2
    assert re.match(r"error: the prompt has \d+ tokens .* context of 10", result.err)


def test_minus_one_goes_on_until_the_context_is_full(monkeypatch, run, pair, tokenizer):
    tokens = tokenizer.convert_tokens_to_ids(list("ab" * 300))
    made = play(monkeypatch, script(tokens, [5]))
    pair.context_length = 400
    content = json.loads(run("generate", "-m", "-1", "--json").out)
    assert content["finish_reason"] == "length"
    assert len(made[0].request.prompt) + content["stats"]["emitted"] == 400


def test_ctrl_c_ends_quietly(monkeypatch, run, tokenizer):
    def interrupt(name):
        if name == "step":
            raise KeyboardInterrupt

    played = says(tokenizer, "abc")
    played.before = interrupt
    play(monkeypatch, played)
    result = run("generate")
    assert (result.code, result.out, result.err) == (130, "a", "")
