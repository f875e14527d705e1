"""What the target writes for itself is what plain decoding would give, with every token's author
known; killed at any moment, it goes on to the same files."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import apply_top_p
from tokenizers.processors import TemplateProcessing

from mlx_redrafter.decoding.loop import Decoder
from mlx_redrafter.decoding.options import SamplingOptions
from mlx_redrafter.decoding.target import Target
from mlx_redrafter.errors import FormatError, InputError, RedrafterError
from mlx_redrafter.training import conversations
from mlx_redrafter.training.conversations import Row, RowWriter
from mlx_redrafter.training.corpus import ASSISTANT, PADDING, TEMPLATE, USER, read_corpus
from mlx_redrafter.training.data import DataOptions, write_data
from mlx_redrafter.training.framing import ChatFrame
from mlx_redrafter.training.prompts import Prompt
from tests import tiny_models
from tests.fakes import byte_level, fake_pair, sentencepiece

OPTIONS = DataOptions(
    tokens=200, row_length=96, rows_per_shard=6, temperatures=(0.0, 1.0), batch_size=4, max_turns=3
)
PROMPTS = (
    Prompt(("hello there", "how are <|im_end|> you?"), system="the fox"),
    Prompt(("the quick <|im_end|> brown fox",)),
    Prompt(("jumps over the lazy",), raw=True),
)
VOCAB, IM_START, IM_END = 318, 1, 2
BRIDGE = [2, 201, 1, 67, 284, 306, 201]  # <|im_end|>\n<|im_start|>assistant\n
BETWEEN = [2, 201, 1, 287, 201]  # <|im_end|>\n<|im_start|>user\n


@cache
def make_pair(family: str = "llama", template: bool = True, seed: int = 0) -> Any:
    """A random model whose law is flat enough to vary, and that likes to end its turn."""
    model = tiny_models.build(family, vocab_size=VOCAB, seed=seed, tie_word_embeddings=False)
    model.lm_head.weight *= 0.4
    model.lm_head.weight[IM_END] *= 3
    tokenizer = byte_level() if template else byte_level(template=None)
    return fake_pair(tokenizer, target=Target(model))


def write(folder: Path, pair: Any = None, options: DataOptions = OPTIONS, **given: Any) -> Any:
    return write_data(pair or make_pair(), folder, options, **given)


def contents(paths: list[Path]) -> list[dict[str, np.ndarray]]:
    return [dict(np.load(path)) for path in paths]


def assert_same(one: list[Path], other: list[Path]) -> None:
    assert [path.name for path in one] == [path.name for path in other]
    for a, b in zip(contents(one), contents(other), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].tobytes() == b[name].tobytes(), name


def runs(roles: Any) -> Iterator[tuple[int, int, int]]:
    """(role, first, end) of every stretch of one role."""
    place = 0
    for role, group in groupby(roles):
        count = len(list(group))
        yield int(role), place, place + count
        place += count


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Rows of prompts and of the model's own, written without interruption."""
    return write(tmp_path_factory.mktemp("whole") / "data", prompts=PROMPTS)


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "llama-window"])
def test_rows_are_what_plain_decoding_gives(family: str) -> None:
    """Token by token, greedy and sampled, answers and made-up user turns, across turns and beside
    other rows: batching, caches carried from turn to turn and positions change nothing."""
    options = dataclasses.replace(OPTIONS, top_p=1.0)
    pair = make_pair(family)
    rows = RowWriter(pair, options, list(PROMPTS)).write(0, set(), lambda done: None)
    assert pair.target.take_hidden() is None
    turns = {0.0: 0, 1.0: 0, "user": 0}
    for row in rows:
        given = len(row.given.turns) if row.given else 0
        users = 0
        for role, first, end in runs(row.roles):
            users += role == USER
            if role == TEMPLATE or (role == USER and users <= given):
                continue
            temperature = row.temperature if role == ASSISTANT else 1.0
            decoder = Decoder(pair.target, sampling=SamplingOptions(temperature, row.seed))
            text = [decoder.start(row.ids[:first])]
            while len(text) < end - first:
                text += decoder.step().tokens
                decoder.commit(1)
            assert text == row.ids[first:end]
            turns["user" if role == USER else temperature] += 1
    assert min(turns.values()) >= 2, turns


def test_every_token_has_its_author(whole: list[Path]) -> None:
    answers = users = further = 0
    for shard in contents(whole):
        assert shard["ids"].shape == shard["role"].shape
        assert shard["ids"].shape[1] == 96
        assert set(shard["temp"].tolist()) <= {0.0, 1.0}
        for ids, roles in zip(shard["ids"].tolist(), shard["role"].tolist(), strict=True):
            stretches = list(runs(roles))
            if stretches[-1][0] == PADDING:
                assert not any(ids[stretches.pop()[1] :])
            assert PADDING not in [role for role, _, _ in stretches]
            assert roles.count(ASSISTANT) >= conversations._LEAST_ANSWER
            raw = stretches[0][0] == USER
            for (role, first, end), before in zip(stretches, [None, *stretches], strict=False):
                part = ids[first:end]
                if role == ASSISTANT:
                    answers += 1
                    assert raw or ids[:first][-len(BRIDGE) :] == BRIDGE
                    assert IM_END not in part[:-1]  # its own end of turn, once, is the answer's
                elif role == USER:
                    users += 1
                    assert not {0, IM_START, IM_END} & set(part)
                elif before is None:
                    assert part[0] == IM_START
                    assert part[-3:] == [IM_START, 287, 201]
                elif before[0] == ASSISTANT:
                    further += 1
                    assert ids[first - 1] == IM_END
                    assert part[:4] == BETWEEN[1:]
                else:
                    assert part == BRIDGE
    assert answers > 10
    assert users > 10
    assert further > 5


def test_prompts_and_their_systems_are_answered_in_turn(whole: list[Path]) -> None:
    decode = make_pair().tokenizer.decode
    rows = [decode(ids) for shard in contents(whole) for ids in shard["ids"].tolist()]
    systems = [row for row in rows if row.startswith("<|im_start|>system\nthe fox<|im_end|>\n")]
    assert systems
    assert all("user\nhello there<|im_end|>\n<|im_start|>assistant" in row for row in systems)
    assert any("user\nhow are <|im_end|> you?<|im_end|>" in row for row in systems)
    assert any(row.startswith("jumps over the lazy") for row in rows)
    own = [row for row in rows if row.startswith("<|im_start|>user\n") and "quick" not in row[:40]]
    assert len(own) > 3


def test_no_two_rows_are_alike_and_temperatures_are_even(whole: list[Path]) -> None:
    shards = contents(whole)
    assert len(shards) > 1
    openings = np.concatenate([shard["opening"] for shard in shards])
    assert len(set(openings.tolist())) == len(openings)
    rows = [tuple(row) for shard in shards for row in shard["ids"].tolist()]
    assert len(set(rows)) == len(rows)
    writer = RowWriter(make_pair(), OPTIONS, list(PROMPTS))
    plans = [writer.plan(shard) for shard in range(4)]
    for plan in plans:
        assert sorted(index for _, index in plan) == [0, 0, 0, 1, 1, 1]
        assert sum(prompt is None for prompt, _ in plan) == 3
        assert {prompt for prompt, _ in plan if prompt} == set(PROMPTS)
    assert len({tuple(index for _, index in plan) for plan in plans}) > 1


def test_what_was_written_before_is_not_written_again(tmp_path: Path) -> None:
    own = dataclasses.replace(OPTIONS, rows_per_shard=3)
    writer = RowWriter(make_pair(), own, [])
    before = {row.opening for row in writer.write(0, set(), lambda done: None)}
    after = {row.opening for row in writer.write(0, before, lambda done: None)}
    assert before
    assert after
    assert not before & after
    # A greedy answer to the only prompt: the first shard has it, the second finds nothing new.
    options = dataclasses.replace(
        OPTIONS, temperatures=(0.0,), self_prompted=0.0, max_turns=1, rows_per_shard=2
    )
    with pytest.raises(InputError, match="repeats itself"):
        write(tmp_path, options=options, prompts=[Prompt(("jumps over",))])
    (shard,) = contents(list(tmp_path.glob("*.npz")))
    assert len(shard["ids"]) == 1


def test_seeds_differ_between_rows_attempts_and_shards() -> None:
    writer = RowWriter(make_pair(), OPTIONS, [])
    seeds = {
        writer.begin(shard, slot, attempt, (None, 0)).seed
        for shard in range(3)
        for slot in range(3)
        for attempt in range(3)
    }
    assert len(seeds) == 27


def test_a_model_without_a_template_continues_texts(tmp_path: Path) -> None:
    pair = make_pair(template=False)
    options = dataclasses.replace(OPTIONS, tokens=120, row_length=64)
    prompts = [Prompt(("the quick brown fox", "left out"), "too")]
    paths = write(tmp_path, pair, options, prompts=prompts)
    given = pair.tokenizer.encode("the quick brown fox")
    own = 0
    for shard in contents(paths):
        for ids, roles in zip(shard["ids"].tolist(), shard["role"].tolist(), strict=True):
            stretches = [stretch for stretch in runs(roles) if stretch[0] != PADDING]
            if roles[0] == USER:
                assert ids[: len(given)] == given
                assert [role for role, _, _ in stretches] == [USER, ASSISTANT]
            else:
                own += 1
                assert ids[0] == IM_END  # this tokenizer has no other token to begin with
                assert [role for role, _, _ in stretches] == [TEMPLATE, USER, ASSISTANT]
                assert stretches[1][2] <= 1 + conversations._OPENING
    assert own > 1


def test_a_loop_is_cut_where_it_begins() -> None:
    row = Row(0, 0, 0.0, 0, None)
    row.extend([5, 6], [TEMPLATE, USER])
    text = [*range(100, 140), *(list(range(10)) * 20)]
    for token in text:
        row.add(token)
        if row.loops:
            break
    assert len(row.answer) < 40 + 10 + conversations._LOOP_WINDOW
    row.cut_loop()
    assert row.ids == [5, 6, *text[:50]]  # the first time stays
    assert row.roles == [TEMPLATE, USER, *[ASSISTANT] * 50]
    assert row.answer == text[:50]


def test_text_that_quotes_is_no_loop() -> None:
    row = Row(0, 0, 0.0, 0, None)
    for token in [*range(60), *range(100, 140), *range(40), *range(200, 240), *range(20, 50)]:
        row.add(token)
        assert not row.loops


def test_a_model_that_only_repeats_itself_is_refused(tmp_path: Path) -> None:
    model = tiny_models.build("llama", vocab_size=VOCAB)
    genuine = model.__class__.__call__

    class Stubborn(model.__class__):  # type: ignore[misc, name-defined]
        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            return genuine(self, *args, **kwargs) + 999.0 * (mx.arange(VOCAB) == 77)

    model.__class__ = Stubborn
    options = dataclasses.replace(OPTIONS, rows_per_shard=2)
    with pytest.raises(InputError, match="repeats itself"):
        write(tmp_path, fake_pair(byte_level(), target=Target(model)), options)
    assert [path.name for path in tmp_path.iterdir()] == ["data.json"]


def test_the_cut_of_the_tail_is_mlx_lms() -> None:
    for seed in range(4):
        logits = 4 * mx.random.normal((1, 500), key=mx.random.key(seed))
        logprobs = logits - mx.logsumexp(logits)
        for top_p in (0.1, 0.5, 0.95):
            found = np.array(conversations._cut_tail(logprobs, top_p))
            np.testing.assert_array_equal(found, np.array(apply_top_p(logprobs, top_p)))


# --- files ----------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def test_killed_anywhere_it_goes_on_to_the_same_files(
    tmp_path: Path, whole: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine: Callable[..., Any] = conversations.BatchGenerator.next_generated
    left = 0

    def next_generated(self: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise Killed
        return genuine(self)

    monkeypatch.setattr(conversations.BatchGenerator, "next_generated", next_generated)
    kills = 0
    for calls in (20, 150, 0):
        left = calls
        try:
            paths = write(tmp_path / "data", prompts=PROMPTS)
        except Killed:
            kills += 1
            assert make_pair().target.take_hidden() is None
    assert kills == 2
    assert_same(paths, whole)
    assert len(list((tmp_path / "data").iterdir())) == len(whole) + 1


def test_killed_while_writing_a_file_leaves_none(
    tmp_path: Path, whole: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(whole[0].parent, folder)
    (folder / whole[1].name).unlink()
    save = np.savez_compressed

    def cut(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", cut)
    with pytest.raises(RedrafterError, match="No space left"):
        write(folder, prompts=PROMPTS)
    assert not (folder / whole[1].name).exists()
    assert not list(folder.glob(".*"))
    monkeypatch.setattr(np, "savez_compressed", save)
    # A shard lost in the middle is written again, as it was.
    assert_same(write(folder, prompts=PROMPTS), whole)


def test_what_is_there_is_kept_and_more_can_be_asked_for(
    tmp_path: Path, whole: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(whole[0].parent, folder)
    reports: list[tuple[int, int]] = []
    more = dataclasses.replace(OPTIONS, tokens=OPTIONS.tokens + 60)
    paths = write(folder, options=more, prompts=PROMPTS, report=lambda *now: reports.append(now))
    assert_same(paths[: len(whole)], whole)
    assert reports[-1][0] >= more.tokens
    assert all(wanted == more.tokens for _, wanted in reports)
    corpus = read_corpus(folder, VOCAB)
    assert (corpus.role == ASSISTANT).sum() == reports[-1][0]
    monkeypatch.setattr(conversations.BatchGenerator, "next_generated", None)
    fewer = dataclasses.replace(OPTIONS, tokens=10)
    assert write(folder, options=fewer, prompts=PROMPTS) == paths[:1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"options": DataOptions(**{**vars(OPTIONS), "seed": 1})}, r"\(seed\)"),
        (
            {"options": DataOptions(**{**vars(OPTIONS), "temperatures": (0.0,), "top_p": 1.0})},
            r"\(temperatures, top_p\)",
        ),
        ({"prompts": PROMPTS[:1]}, r"\(prompts, num_prompts\)"),
        ({"texts": ["a"]}, r"\(texts\)"),
        ({"pair": lambda: make_pair(seed=1)}, r"\(target\)"),
        ({"pair": lambda: make_pair(template=False)}, r"\(target\)"),
    ],
)
def test_a_folder_of_other_data_is_refused(
    whole: list[Path], change: dict[str, Any], says: str
) -> None:
    before = sorted(whole[0].parent.iterdir())
    change = {name: value() if callable(value) else value for name, value in change.items()}
    with pytest.raises(InputError, match=says) as told:
        write(whole[0].parent, **{"prompts": PROMPTS, **change})
    assert "\n" not in str(told.value)
    assert sorted(whole[0].parent.iterdir()) == before


def test_a_broken_folder_is_refused(tmp_path: Path, whole: list[Path]) -> None:
    folder = tmp_path / "data"
    shutil.copytree(whole[0].parent, folder)
    (folder / whole[0].name).write_bytes(whole[0].read_bytes()[:200])
    with pytest.raises(FormatError, match=whole[0].name):
        write(folder, prompts=PROMPTS)
    for content in ("", "3", '{"version": '):
        (folder / "data.json").write_text(content)
        with pytest.raises(FormatError, match="broken"):
            write(folder, prompts=PROMPTS)
    (folder / "data.json").unlink()
    with pytest.raises(InputError, match=r"no data\.json"):
        write(folder, prompts=PROMPTS)
    (tmp_path / "file").write_text("")
    with pytest.raises(RedrafterError, match="cannot write"):
        write(tmp_path / "file")


def test_texts_are_cut_to_rows_as_they_are(tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, tokens=0, rows_per_shard=2)
    texts = ["the quick brown fox " * 30, "how are you? " * 30, "the quick brown fox " * 30]
    paths = write(tmp_path, options=options, texts=texts)
    assert [path.name for path in paths][:2] == ["text-00000.npz", "text-00001.npz"]
    assert all(np.isnan(shard["temp"]).all() for shard in contents(paths))
    rows = [row for shard in contents(paths) for row in shard["ids"].tolist()]
    roles = [row for shard in contents(paths) for row in shard["role"].tolist()]
    assert len({tuple(row) for row in rows}) == len(rows)
    encode = make_pair().tokenizer.encode
    first = encode(texts[0])
    kept = [
        i
        for row, role in zip(rows, roles, strict=True)
        for i, r in zip(row, role, strict=True)
        if r < 3
    ]
    assert kept[: len(first)] == first
    assert kept[len(first)] == IM_END
    assert [r for role in roles for r in role][len(first)] == TEMPLATE
    assert json.loads((tmp_path / "data.json").read_text())["num_prompts"] == 0


def test_rows_of_a_text_begin_as_the_tokenizer_begins(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer._tokenizer.bos_token = "<|endoftext|>"
    tokenizer._tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    pair = fake_pair(tokenizer, target=make_pair().target)
    options = dataclasses.replace(OPTIONS, tokens=0)
    (path,) = write(tmp_path, pair, options, texts=["hello there, how are you? " * 30])
    shard = np.load(path)
    assert (shard["ids"][:, 0] == 0).all()
    assert (shard["role"][:, 0] == TEMPLATE).all()
    assert (shard["ids"][:2, 1:] != 0).all()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"tokens": -1}, "tokens is -1"),
        ({"row_length": 10}, "row_length"),
        ({"rows_per_shard": 0}, "rows_per_shard"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_turns": 0}, "max_turns"),
        ({"seed": -1}, "seed"),
        ({"temperatures": ()}, "temperature"),
        ({"temperatures": (0.0, -1.0)}, "temperature"),
        ({"temperatures": (float("nan"),)}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"self_prompted": 1.5}, "self_prompted"),
    ],
)
def test_options_are_checked(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        DataOptions(**values)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    long = Prompt(("hello there " * 60,))
    with pytest.raises(InputError, match="no prompt leaves room"):
        write(tmp_path, prompts=[long])
    writer = RowWriter(make_pair(), OPTIONS, [long, PROMPTS[0]])
    assert writer.prompts == [PROMPTS[0]]
    with pytest.raises(InputError, match="context has 10000"):
        write(tmp_path, options=dataclasses.replace(OPTIONS, row_length=10_001))
    with pytest.raises(InputError, match="no texts"):
        write(tmp_path, options=dataclasses.replace(OPTIONS, tokens=0))
    assert not list(tmp_path.iterdir())


# --- chat templates -------------------------------------------------------------------------------

SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nfox<|im_end|>\n{% endif %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}<s>the {{ m.content }} he{% endif %}{% endfor %}"
)


def test_the_frame_is_what_the_template_puts_around() -> None:
    frame = ChatFrame(fake_pair(byte_level(SYSTEM + CHATML)))
    decode = byte_level().decode
    assert decode(frame.head) == "<|im_start|>system\nfox<|im_end|>\n<|im_start|>user\n"
    assert decode(frame.bridge) == "<|im_end|>\n<|im_start|>assistant\n"
    assert decode(frame.between) == "<|im_end|>\n<|im_start|>user\n"
    assert sorted(frame.user_stops()) == [[0], [1], [2]]
    for content in ("x", "yx", "hello <|im_end|>\nthere", "\n"):
        for ids, roles in (frame.opening(content, None), frame.further(content)):
            said = [i for i, role in zip(ids, roles, strict=True) if role == USER]
            assert decode(said) == content
            assert decode(ids).endswith(content + decode(frame.bridge))
    ids, roles = frame.opening("hello", "be brief")
    assert decode(ids).startswith("<|im_start|>system\nbe brief<|im_end|>")
    said = [i for i, role in zip(ids, roles, strict=True) if role == USER]
    assert decode(said) == "hello"


def test_a_user_turn_may_end_in_plain_words() -> None:
    tokenizer = sentencepiece(PLAIN)
    frame = ChatFrame(fake_pair(tokenizer))
    convert = tokenizer.convert_ids_to_tokens
    assert convert(frame.head)[:2] == ["<s>", "\u2581the"]
    assert convert(frame.bridge) == ["\u2581", "he"]
    assert convert(frame.between)[:3] == ["</s>", "<s>", "\u2581the"]
    assert frame.bridge in frame.user_stops()


def test_what_ended_the_users_turn_becomes_the_templates() -> None:
    writer = RowWriter(fake_pair(sentencepiece(PLAIN)), OPTIONS, [])
    assert writer._frame is not None
    bridge = writer._frame.bridge
    for ending, as_read in ((bridge, True), ([2], False), ([], True)):
        row = writer.begin(0, 0, 0, (None, 0))
        start = len(row.ids)
        for token in [300, 301, *ending]:
            row.add(token)
        assert writer.end_user_turn(row, bool(ending)) == as_read
        assert row.ids[start:] == [300, 301, *bridge]
        assert row.roles[start:] == [USER, USER, *[TEMPLATE] * len(bridge)]
        assert row.writing == ASSISTANT


def test_a_template_that_hides_the_user_is_refused() -> None:
    with pytest.raises(InputError, match="does not show"):
        ChatFrame(fake_pair(byte_level("<|im_start|>user\nhello<|im_end|>")))
