"""The tiny target is what tests of training need: exact in trees, right, and diverse."""

import re
from pathlib import Path

import pytest

from mlx_redrafter.decoding.options import SamplingOptions
from mlx_redrafter.generate import generate
from mlx_redrafter.load import ModelPair, load
from mlx_redrafter.machine import paths
from tests.fixtures import tiny_language as language

OPENED_USER_TURN = "<|start|>user\n"
_WORD = "[A-Z]?[a-z]+"
REQUESTS = re.compile(
    rf"What is \d+ (plus|minus) \d+\?|Add \d+ and \d+\.|Count from \d+ to \d+\."
    rf"|What is the opposite of {_WORD}\?|What colour is (the )?{_WORD}\?"
    rf"|{_WORD} has \d {_WORD} and {_WORD} has \d {_WORD}\. How many {_WORD} does {_WORD} have\?"
    rf"|{_WORD} likes {_WORD}\. {_WORD} likes {_WORD}\. What does {_WORD} like\?"
    rf"|Say {_WORD} {_WORD} times\.|Spell {_WORD}\.|Name {_WORD} {_WORD}\."
    rf"|(Tell me a story|Write a short story) about a {_WORD} {_WORD} named {_WORD}\."
    rf"|Hello, I am {_WORD}\.|What is my name\?"
)


@pytest.fixture(scope="module")
def pair(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(paths.VARIABLE, str(tmp_path_factory.mktemp("home")))
        return load(str(tiny_target), None, "float32")


def ask(pair: ModelPair, text: str) -> str:
    return generate(pair, text, max_tokens=100).text


def test_small_and_exact_in_trees(pair: ModelPair, tiny_target: Path) -> None:
    assert pair.target.supports_trees, pair.target.reason
    assert pair.context_length == 512
    assert sum(path.stat().st_size for path in tiny_target.iterdir()) < 700_000


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is 3 plus 4?", "3 plus 4 is 7."),
        ("Count from 5 to 9.", "5, 6, 7, 8, 9."),
        ("What is the opposite of big?", "The opposite of big is small."),
        ("Say river three times.", "river river river"),
        ("Spell mouse.", "m-o-u-s-e"),
    ],
)
def test_it_answers(pair: ModelPair, question: str, answer: str) -> None:
    assert ask(pair, question) == answer


def test_most_answers_are_right(pair: ModelPair) -> None:
    fixed = [turn for turn in language.questions(seed=101, number=80) if turn.fixed][:40]
    right = sum(ask(pair, turn.user) == turn.assistant for turn in fixed)
    assert right >= 32


def test_stories_are_about_what_was_asked(pair: ModelPair) -> None:
    asked = [("red", "fox", "Mia"), ("blue", "dog", "Tom"), ("grey", "hen", "Nora")]
    told = [ask(pair, f"Tell me a story about a {c} {a} named {n}.") for c, a, n in asked]
    for (colour, animal, name), text in zip(asked, told, strict=True):
        assert text.startswith(f"{name} was a {colour} {animal} and lived near the ")
        assert (" she " in text) == (name in language.SHE)
        assert text[-1] == "."
    assert len({text.split("lived near")[1] for text in told}) > 1


def test_a_name_is_kept_over_turns(pair: ModelPair) -> None:
    messages = [{"role": "user", "content": "Hello, I am Lena."}]
    messages += [{"role": "assistant", "content": generate(pair, messages).text}]
    assert messages[1]["content"] == "Hello Lena! How can I help you?"
    messages += [{"role": "user", "content": "What is my name?"}]
    assert generate(pair, messages).text == "Your name is Lena."


def test_it_asks_itself(pair: ModelPair) -> None:
    opened = pair.tokenizer.encode(OPENED_USER_TURN, add_special_tokens=False)
    rendered = pair.tokenizer.apply_chat_template([{"role": "user", "content": "Spell fox."}])
    assert rendered[: len(opened)] == opened
    turns = [
        generate(pair, opened, max_tokens=60, sampling=SamplingOptions(1.0, seed))
        for seed in range(40)
    ]
    assert {turn.finish_reason for turn in turns} == {"stop"}
    formed = [turn.text for turn in turns if REQUESTS.fullmatch(turn.text)]
    assert len(formed) >= 36
    assert len(set(formed)) >= 32
