"""Conversations on an engine that plays scripts: messages, cache, context, files, thinking."""

import json
import os
import random
import stat

import pytest

from mlx_redrafter.chat import Chat, Thinking
from mlx_redrafter.errors import FormatError, InputError, RedrafterError
from mlx_redrafter.generate import encode_prompt
from tests.fakes import byte_level, fake_pair, play, script


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level()


@pytest.fixture
def pair(tokenizer):
    return fake_pair(tokenizer)


def says(tokenizer, text, sizes=(3,), end=True):
    tokens = tokenizer.convert_tokens_to_ids(list(text))
    return script([*tokens, tokenizer.eos_token_id] if end else tokens, sizes)


def finish(reply):
    return "".join(segment.text for segment in reply)


def test_turns_join_the_conversation(monkeypatch, pair, tokenizer):
    made = play(monkeypatch, says(tokenizer, "one"), says(tokenizer, "two"))
    chat = Chat(pair, system_prompt="be brief")
    assert finish(chat.ask("first")) == "one"
    assert finish(chat.ask("second")) == "two"
    assert [m["content"] for m in chat.messages] == ["first", "one", "second", "two"]
    expected = encode_prompt(pair, chat.messages[:3], system_prompt="be brief")
    assert made[1].request.prompt == expected
    assert chat.stats.emitted == 4
    assert (chat.totals.answers, chat.totals.emitted) == (2, 8)


def test_a_warm_turn_has_the_rows_of_a_cold_one(monkeypatch, pair, tokenizer):
    """Whatever is edited in between, the engine is fed the rest of the very same prompt."""
    rng = random.Random(0)
    words = ["the", "quick", "brown", "fox", "hello"]
    replies = [says(tokenizer, rng.choice(words), [rng.randrange(1, 4)]) for _ in range(60)]
    made = play(monkeypatch, *replies)
    chat = Chat(pair)
    saved = 0
    for _ in range(60):
        action = rng.random()
        if action < 0.2 and chat.messages:
            reply = chat.retry()
        else:
            if action < 0.3:
                chat.system_prompt = rng.choice([None, *words])
            reply = chat.ask(rng.choice(words))
        finish(reply)
        decoder = made[-1]
        cold = encode_prompt(pair, chat.messages[:-1], system_prompt=chat.system_prompt)
        assert decoder.request.prompt == cold
        assert decoder.cache.rows[: len(cold)] == cold
        saved += len(cold) - len(decoder.prefilled)
    assert saved > 1000


def test_a_second_turn_feeds_only_what_is_new(monkeypatch, pair, tokenizer):
    made = play(monkeypatch, says(tokenizer, "abc"), says(tokenizer, "d"))
    chat = Chat(pair)
    finish(chat.ask("x"))
    finish(chat.ask("y"))
    fed = tokenizer.decode(made[1].prefilled)
    assert fed == "<|im_end|>\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"


def test_retry_answers_again_with_another_seed(monkeypatch, pair, tokenizer):
    made = play(monkeypatch, *(says(tokenizer, word) for word in ("one", "two", "three", "four")))
    chat = Chat(pair, temperature=0.7, seed=5)
    finish(chat.ask("x"))
    assert finish(chat.retry()) == "two"
    assert [m["content"] for m in chat.messages] == ["x", "two"]
    assert made[1].request.prompt == made[0].request.prompt
    finish(chat.retry())
    finish(chat.ask("y"))
    assert [decoder.request.sampling.seed for decoder in made] == [5, 6, 7, 7]


def test_without_a_seed_each_answer_has_its_own(monkeypatch, pair, tokenizer):
    made = play(monkeypatch, says(tokenizer, "a"), says(tokenizer, "b"))
    chat = Chat(pair, temperature=0.7)
    finish(chat.ask("x"))
    finish(chat.ask("y"))
    assert made[0].request.sampling.seed != made[1].request.sampling.seed
    assert chat.stats.seed == made[1].request.sampling.seed


def test_nothing_to_retry_and_nothing_to_answer(pair):
    with pytest.raises(InputError):
        Chat(pair).retry()
    with pytest.raises(InputError):
        Chat(pair).ask(" \n ")


def test_a_reply_changes_nothing_until_it_is_read(pair):
    chat = Chat(pair)
    chat.ask("x")
    assert chat.messages == []


# --- stopped answers


def test_a_stopped_answer_is_kept_as_far_as_it_got(monkeypatch, pair, tokenizer):
    made = play(monkeypatch, says(tokenizer, "abcdefgh", [2]), says(tokenizer, "z"))
    chat = Chat(pair)
    reply = chat.ask("x")
    for segment in reply:
        if segment.text == "bc":
            reply.cancel()
    assert reply.finish_reason == "cancelled"
    assert [m["content"] for m in chat.messages] == ["x", "abc"]
    finish(chat.ask("y"))
    assert tokenizer.decode(made[1].prefilled).startswith("c<|im_end|>")  # c: the last token


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["start", "step", "commit"])
def test_an_interrupted_answer_keeps_the_session(monkeypatch, pair, tokenizer, where, error):
    def interrupt(name):
        if name == where:
            raise error

    broken = says(tokenizer, "abcdef")
    broken.before = interrupt
    made = play(monkeypatch, says(tokenizer, "one"), broken, says(tokenizer, "two"))
    chat = Chat(pair)
    finish(chat.ask("x"))
    with pytest.raises(error):
        finish(chat.ask("y"))
    kept = ["x", "one"] if where == "start" else ["x", "one", "y", "a"]
    assert [m["content"] for m in chat.messages] == kept
    finish(chat.ask("z"))
    assert [m["content"] for m in chat.messages] == [*kept, "z", "two"]
    cold = encode_prompt(pair, chat.messages[:-1])
    assert made[2].cache.rows[: len(cold)] == cold
    assert len(made[2].prefilled) < len(cold)


def test_retry_after_an_answer_without_a_word(monkeypatch, pair, tokenizer):
    """The question that was not answered is asked again; the turn before it stays."""

    def interrupt(name):
        raise KeyboardInterrupt

    broken = says(tokenizer, "x")
    broken.before = interrupt
    replies = [says(tokenizer, word) for word in ("one", "two", "three")]
    play(monkeypatch, replies[0], broken, broken, replies[1], broken, replies[2])
    chat = Chat(pair)
    finish(chat.ask("go on"))
    for again in (lambda: chat.ask("go on"), chat.retry):
        with pytest.raises(KeyboardInterrupt):
            finish(again())
        assert [m["content"] for m in chat.messages] == ["go on", "one"]
    finish(chat.retry())
    assert [m["content"] for m in chat.messages] == ["go on", "one", "go on", "two"]
    # A retry that fails leaves the answer that was there, and can be tried again.
    with pytest.raises(KeyboardInterrupt):
        finish(chat.retry())
    assert [m["content"] for m in chat.messages] == ["go on", "one", "go on", "two"]
    finish(chat.retry())
    assert [m["content"] for m in chat.messages] == ["go on", "one", "go on", "three"]


def test_an_answer_stopped_before_its_first_character_is_none(monkeypatch, pair, tokenizer):
    emoji = tokenizer.encode("\U0001f600", add_special_tokens=False)
    play(monkeypatch, script([*emoji, tokenizer.eos_token_id], [1]))
    chat = Chat(pair)
    stream = iter(chat.ask("x"))
    assert next(stream).text == ""
    stream.close()
    assert chat.messages == []


def test_half_a_character_does_not_stay_in_the_conversation(monkeypatch, pair, tokenizer):
    tokens = tokenizer.encode("a\U0001f600", add_special_tokens=False)
    play(monkeypatch, script(tokens, [1]))
    chat = Chat(pair, max_tokens=3)
    assert finish(chat.ask("x")) == "a\ufffd"
    assert chat.messages[-1]["content"] == "a"


def test_an_empty_answer_is_an_answer(monkeypatch, pair, tokenizer):
    play(monkeypatch, says(tokenizer, ""))
    chat = Chat(pair)
    finish(chat.ask("x"))
    assert [m["content"] for m in chat.messages] == ["x", ""]


# --- the context


def test_the_oldest_turns_go_when_the_context_is_full(monkeypatch, tokenizer):
    pair = fake_pair(tokenizer, context_length=400)
    made = play(monkeypatch, *(says(tokenizer, "okay") for _ in range(40)))
    chat = Chat(pair, system_prompt="be brief", max_tokens=20)
    told, rng = [], random.Random(0)
    for turn in range(40):
        reply = chat.ask(f"{turn}" + " hello there" * rng.randrange(1, 9))
        first = chat.first
        told.append(reply.dropped_turns)
        finish(reply)
        assert chat.first - first == 2 * reply.dropped_turns
        assert chat.messages[chat.first]["role"] == "user"
        assert len(reply.prompt) + 20 <= 400
        text = tokenizer.decode(made[-1].request.prompt)
        assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n")
        # Everything from the first kept turn on is there, and the question last.
        kept = [m["content"] for m in chat.messages[chat.first : -1]]
        assert [text.count(f"\n{content}<|im_end|>") > 0 for content in kept] == [True] * len(kept)
    assert len(chat.messages) == 80
    cuts = [dropped for dropped in told if dropped]
    assert 2 <= len(cuts) <= 16  # seldom, since each costs a whole prefill
    assert sum(cuts) > 2 * len(cuts)


def test_room_is_kept_for_an_answer_without_a_limit(monkeypatch, tokenizer):
    pair = fake_pair(tokenizer, context_length=200)
    play(monkeypatch, *(says(tokenizer, "okay") for _ in range(10)))
    chat = Chat(pair, max_tokens=-1)
    for _ in range(10):
        reply = chat.ask("hello there")
        assert len(reply.prompt) <= 150
        finish(reply)


def test_a_message_that_cannot_fit_is_refused_and_forgotten(monkeypatch, tokenizer):
    pair = fake_pair(tokenizer, context_length=60)
    play(monkeypatch, says(tokenizer, "one"), says(tokenizer, "two"))
    chat = Chat(pair)
    finish(chat.ask("x"))
    with pytest.raises(InputError, match=r"has \d\d+ tokens .* context of 60"):
        chat.ask("\u4f60" * 60)
    assert [m["content"] for m in chat.messages] == ["x", "one"]
    assert chat.first == 0
    finish(chat.ask("y"))


def test_reset_forgets_all_but_the_system_prompt(monkeypatch, pair, tokenizer):
    made = play(monkeypatch, says(tokenizer, "one"), says(tokenizer, "two"))
    chat = Chat(pair, system_prompt="be brief")
    finish(chat.ask("x"))
    chat.reset()
    assert (chat.messages, chat.context_used, chat.stats) == ([], 0, None)
    finish(chat.ask("y"))
    assert made[1].prefilled == made[1].request.prompt
    assert "be brief" in tokenizer.decode(made[1].request.prompt)


# --- files


@pytest.fixture
def talked(monkeypatch, pair, tokenizer):
    play(monkeypatch, says(tokenizer, "one"), says(tokenizer, "two"), says(tokenizer, "three"))
    chat = Chat(pair, system_prompt="s\u00fc\U0001f600")
    finish(chat.ask("x"))
    return chat


def test_a_saved_conversation_goes_on(tmp_path, talked, pair):
    path = talked.save(tmp_path / "talk.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = Chat(pair)
    assert other.load(path) == "fake"
    assert other.messages == talked.messages
    assert other.system_prompt == talked.system_prompt
    assert finish(other.retry()) == "two"
    assert finish(other.ask("y")) == "three"
    talked.save(path)  # a saved conversation may be replaced
    assert os.listdir(tmp_path) == ["talk.json"]


def test_a_file_that_is_no_conversation_is_not_replaced(tmp_path, talked):
    path = tmp_path / "thesis.json"
    path.write_text('{"messages": []}')
    with pytest.raises(InputError, match="choose another name"):
        talked.save(path)
    assert path.read_text() == '{"messages": []}'
    with pytest.raises(InputError):
        talked.save(tmp_path)


def test_a_failed_save_leaves_the_old_file(tmp_path, talked, monkeypatch):
    path = talked.save(tmp_path / "talk.json")
    before = path.read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RedrafterError, match="No space left"):
        talked.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["talk.json"]
    with pytest.raises(RedrafterError, match="cannot write"):
        talked.save(tmp_path / "nowhere" / "talk.json")


GOOD = {
    "format": "mlx-redrafter-chat",
    "version": 1,
    "model": "m",
    "system_prompt": None,
    "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}],
}


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"format": None},
        {"version": 2},
        {"version": "1"},
        {"model": None},
        {"system_prompt": 3},
        {"system_prompt": "\ud800"},
        {"messages": None},
        {"messages": "xx"},
        {"messages": GOOD["messages"][:1]},
        {"messages": GOOD["messages"][::-1]},
        {"messages": [{"role": "user", "content": "x"}] * 2},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant"}]},
        {"messages": [{"role": "user", "content": "x"}, None]},
        {"messages": [GOOD["messages"][0] | {"name": 1}, GOOD["messages"][1]]},
        {"messages": [GOOD["messages"][0], {"role": "assistant", "content": "\udfff"}]},
    ],
)
def test_a_broken_file_changes_nothing(tmp_path, talked, change):
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(GOOD))
    Chat(talked.pair).load(path)
    path.write_text(json.dumps(GOOD | change))
    before = (list(talked.messages), talked.system_prompt)
    with pytest.raises(FormatError) as caught:
        talked.load(path)
    assert "\n" not in str(caught.value)
    assert (talked.messages, talked.system_prompt) == before


@pytest.mark.parametrize("content", [b"", b"[", b"\xff", b"[]", b"3", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(tmp_path, talked, content):
    path = tmp_path / "talk.json"
    path.write_bytes(content)
    with pytest.raises(FormatError):
        talked.load(path)


def test_files_that_are_not_there(tmp_path, talked):
    for name in (tmp_path / "none.json", tmp_path, "~nobody-of-this-name/x"):
        with pytest.raises(InputError):
            talked.load(name)


# --- thinking


def split(text, size, inside=False, tags=("<think>", "</think>")):
    parser, parts = Thinking(*tags, inside), []
    for start in range(0, len(text), size):
        parts += parser.feed(text[start : start + size])
    parts += parser.finish()
    joined: list[list] = []
    for part, thinking in parts:
        if joined and joined[-1][1] == thinking:
            joined[-1][0] += part
        else:
            joined.append([part, thinking])
    return [tuple(part) for part in joined]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_thinking_is_told_from_the_answer(size):
    assert split("<think>a</think>b", size) == [("<think>a</think>", True), ("b", False)]
    assert split("\n<think>a", size) == [("\n", False), ("<think>a", True)]
    assert split("a</think>b", size, inside=True) == [("a</think>", True), ("b", False)]
    assert split("<think></th</think>", size) == [("<think></th</think>", True)]
    assert split("<thin", size) == [("<thin", False)]
    assert split("<think>a</thi", size) == [("<think>a</thi", True)]
    # Only the beginning is thinking: text may speak of the tags.
    assert split("use <think>x</think>", size) == [("use <think>x</think>", False)]
    assert split("<think>a</think>b<think>", size)[1:] == [("b<think>", False)]
    assert split("  ", size) == [("  ", False)]
    assert split("[T]a[/T]b", size, tags=("[T]", "[/T]"))[0] == ("[T]a[/T]", True)


def test_nothing_is_lost_or_held_for_long():
    rng = random.Random(3)
    for _ in range(500):
        text = "".join(rng.choice(["<think>", "</think>", "<", "x", "/", " "]) for _ in range(8))
        for inside in (False, True):
            assert "".join(part for part, _ in split(text, 1, inside)) == text
    parser = Thinking(None, None)
    assert parser.feed("a") == [("a", False)]
    assert parser.feed("<") == [("<", False)]


def test_a_template_may_open_the_thinking(tokenizer):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    pair = fake_pair(byte_level(template, extra=["<think>", "</think>"]))
    assert Chat(pair).ask("x").starts_thinking
    pair = fake_pair(byte_level(template + "</think>", extra=["<think>", "</think>"]))
    assert not Chat(pair).ask("x").starts_thinking
    assert not Chat(fake_pair(tokenizer)).ask("<think>").starts_thinking
