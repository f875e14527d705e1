"""Rows to train on: reading, the draft vocabulary, and where a drafter can be trained."""

from pathlib import Path

import numpy as np
import pytest

from mlx_redrafter.errors import FormatError, InputError
from mlx_redrafter.training.corpus import Corpus, anchors, read_corpus


def save(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


IDS = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=np.uint16)
ROLE = np.array([[2, 1, 1, 1], [0, 0, 1, 1]], dtype=np.uint8)


def test_reads_rows(tmp_path: Path) -> None:
    corpus = read_corpus(save(tmp_path / "own.npz", ids=IDS, role=ROLE), vocab_size=9)
    assert corpus.name == "own"
    assert corpus.num_rows == 2
    assert (corpus.ids == IDS).all()
    assert (corpus.role == ROLE).all()


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"ids": IDS}, "ids and role"),
        ({"ids": IDS, "role": ROLE[:1]}, "equal"),
        ({"ids": IDS[0], "role": ROLE[0]}, "2-D"),
        ({"ids": IDS[:0], "role": ROLE[:0]}, "2-D"),
        ({"ids": IDS.astype(float), "role": ROLE}, "integers"),
        ({"ids": IDS + 100, "role": ROLE}, "outside"),
        ({"ids": IDS.astype(int) - 3, "role": ROLE}, "outside"),
        ({"ids": IDS, "role": ROLE + 2}, "0 to 3"),
        ({"ids": IDS, "role": ROLE, "temp": np.zeros(3)}, "temp"),
        ({"ids": IDS, "role": ROLE, "temp": np.array([0, 1])}, "temp"),
        ({"ids": IDS, "role": np.array([["a"] * 4] * 2, dtype=object)}, "ids and role"),
    ],
)
def test_refuses_what_is_no_corpus(
    tmp_path: Path, arrays: dict[str, np.ndarray], says: str
) -> None:
    with pytest.raises(FormatError, match=says):
        read_corpus(save(tmp_path / "bad.npz", **arrays), vocab_size=9)


def test_a_temperature_is_read_and_is_unknown_otherwise(tmp_path: Path) -> None:
    temperature = np.array([0.0, np.nan], dtype=np.float16)
    corpus = read_corpus(save(tmp_path / "a.npz", ids=IDS, role=ROLE, temp=temperature), 9)
    np.testing.assert_array_equal(corpus.temperature, temperature)
    assert np.isnan(Corpus("own", corpus.ids, corpus.role).temperature).all()


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    save(tmp_path / "rows-00001.npz", ids=IDS, role=ROLE)
    save(tmp_path / "rows-00000.npz", ids=IDS[:1] + 1, role=ROLE[:1], temp=np.ones(1))
    (tmp_path / "data.json").write_text("{}")
    corpus = read_corpus(tmp_path, vocab_size=10)
    assert corpus.name == tmp_path.name
    assert corpus.ids.tolist() == [(IDS[0] + 1).tolist(), *IDS.tolist()]
    assert corpus.role.tolist() == [ROLE[0].tolist(), *ROLE.tolist()]
    np.testing.assert_array_equal(corpus.temperature, [1.0, np.nan, np.nan])
    save(tmp_path / "text-00000.npz", ids=IDS[:, :3], role=ROLE[:, :3])
    with pytest.raises(FormatError, match="lengths"):
        read_corpus(tmp_path, vocab_size=10)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.npz"
    np.savez_compressed(path, ids=IDS, role=ROLE)
    whole = path.read_bytes()
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        with pytest.raises(FormatError):
            read_corpus(path, vocab_size=9)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no \.npz"):
        read_corpus(tmp_path / "empty", vocab_size=9)


def test_refuses_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_corpus(tmp_path / "none.npz", vocab_size=9)
    (tmp_path / "text.npz").write_text("no zip")
    with pytest.raises(FormatError):
        read_corpus(tmp_path / "text.npz", vocab_size=9)


def slow_anchors(role: np.ndarray, known: np.ndarray, horizon: int) -> np.ndarray:
    rows, length = role.shape
    usable = np.zeros((rows, length, horizon), dtype=bool)
    for r in range(rows):
        for p in range(length):
            for depth in range(1, horizon + 1):
                last = p + 1 + depth
                usable[r, p, depth - 1] = (
                    last < length
                    and all(role[r, p + 1 : last + 1] == 1)
                    and all(known[r, p + 2 : last + 1])
                )
    return usable


@pytest.mark.parametrize("horizon", [1, 3, 8])
def test_anchors_equal_their_slow_twin(horizon: int) -> None:
    rng = np.random.default_rng(horizon)
    role = (rng.random((20, 17)) < 0.85).astype(np.uint8)
    known = rng.random((20, 17)) < 0.9
    usable = anchors(role, known, horizon)
    assert (usable == slow_anchors(role, known, horizon)).all()
    assert usable.any()
    assert not usable.all()
