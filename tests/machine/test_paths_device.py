from pathlib import Path

import mlx.core as mx
import pytest

from mlx_redrafter.errors import InputError
from mlx_redrafter.machine import device, paths


def test_home_follows_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(paths.VARIABLE, str(tmp_path / "new"))
    assert paths.home() == tmp_path / "new"
    assert not paths.home().exists()


@pytest.mark.parametrize("value", [None, ""])
def test_home_is_in_the_users_cache(
    value: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if value is None:
        monkeypatch.delenv(paths.VARIABLE)
    else:
        monkeypatch.setenv(paths.VARIABLE, value)
    assert paths.home() == tmp_path / ".cache" / "mlx-redrafter"


def test_memory_is_the_machine_s_or_the_container_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "a CPU"})
    monkeypatch.setattr(device, "_LIMITS", (str(tmp_path / "limit"),))
    whole = device.memory_bytes()
    assert 2**28 < whole < 2**46
    (tmp_path / "limit").write_text("max\n")
    assert device.memory_bytes() == whole
    (tmp_path / "limit").write_text("9223372036854771712\n")
    assert device.memory_bytes() == whole
    (tmp_path / "limit").write_text("1000000\n")
    assert device.memory_bytes() == 1_000_000
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 12.0})
    assert device.memory_bytes() == 12


def test_home_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(paths.VARIABLE, "here")
    assert paths.home() == tmp_path / "here"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(paths.VARIABLE, "~/there")
    assert paths.home() == tmp_path / "there"


def test_home_of_nobody_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(paths.VARIABLE, "~no-such-user/x")
    with pytest.raises(InputError, match=paths.VARIABLE):
        paths.home()


def test_default_dtype_follows_the_device() -> None:
    before = mx.default_device()
    try:
        mx.set_default_device(mx.cpu)
        assert device.default_dtype() == "float32"
        if mx.is_available(mx.gpu):
            mx.set_default_device(mx.gpu)
            assert device.default_dtype() == "bfloat16"
    finally:
        mx.set_default_device(before)
