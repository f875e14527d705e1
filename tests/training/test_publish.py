"""Uploading a drafter, to a stand-in for the Hub that listens on this machine."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

from mlx_redrafter.errors import DownloadError, FormatError, InputError
from mlx_redrafter.hub import DRAFTER_TYPE
from mlx_redrafter.training.publish import check, publish
from tests.shop import folder_with


@dataclass
class FakeHub:
    """Keeps what is uploaded; ``refuse`` is the status of every answer, where it is set."""

    url: str = ""
    refuse: int | None = None
    created: list[dict[str, Any]] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    files: dict[str, bytes] = field(default_factory=dict)
    message: str = ""
    complaints: list[dict[str, str]] = field(default_factory=list)

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/repos/create":
            wanted = json.loads(body)
            self.created.append(wanted)
            owner = wanted.get("organization") or "me"
            return {"url": f"{self.url}/{owner}/{wanted['name']}"}
        if path == "/api/validate-yaml":
            return {"warnings": [], "errors": self.complaints}
        if path.endswith("/preupload/main"):
            names = [each["path"] for each in json.loads(body)["files"]]
            plain = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            return {"files": [{"path": name, **plain} for name in names]}
        assert path.endswith("/commit/main"), path
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "header":
                self.message = entry["value"]["summary"]
            else:
                value = entry["value"]
                self.files[value["path"]] = base64.b64decode(value["content"])
        return {"commitOid": "0" * 40, "commitUrl": f"{self.url}/me/d/commit/0", "success": True}


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            hub.tokens.add(self.headers.get("Authorization"))
            answer = {"error": "no"} if hub.refuse else hub.answer(self.path, body)
            self.respond(hub.refuse or (400 if answer.get("errors") else 200), answer)

        def do_GET(self) -> None:
            self.respond(hub.refuse or 200, {"sha": "0" * 40, "siblings": []})

        def respond(self, status: int, answer: dict[str, Any]) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield hub
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"model_type": DRAFTER_TYPE, "target": {"name": "tiny"}}
    made = folder_with(tmp_path / "out", config)
    (made / "model.safetensors").write_bytes(b"weights")
    (made / "README.md").write_text("# Drafter")
    (made / ".hidden").write_text("not this")
    return made


def test_the_folder_is_what_arrives(fake_hub: FakeHub, folder: Path) -> None:
    address = publish(folder, "me/my-drafter")
    assert address == f"{fake_hub.url}/me/my-drafter"
    assert fake_hub.files == {
        name: (folder / name).read_bytes()
        for name in ("config.json", "model.safetensors", "README.md")
    }
    assert fake_hub.message == "Drafter for tiny, by mlx-redrafter"
    assert fake_hub.tokens == {"Bearer hf_secret"}
    assert [entry["name"] for entry in fake_hub.created] == ["my-drafter"]
    assert not fake_hub.created[0].get("private")


def test_a_private_one_and_a_name_of_one_s_own(fake_hub: FakeHub, folder: Path) -> None:
    assert publish(folder, "alone", private=True) == f"{fake_hub.url}/me/alone"
    sent = fake_hub.created[0]
    assert sent.get("private") is True or sent.get("visibility") == "private"
    assert "model.safetensors" in fake_hub.files


@pytest.mark.parametrize("repo", ["", "a/b/c", "no spaces", "ends.git", "-x/y", "a--b", "x/y..z"])
def test_a_bad_name_is_refused_before_anything_is_sent(
    repo: str, fake_hub: FakeHub, folder: Path
) -> None:
    with pytest.raises(InputError, match="no name of a repository") as error:
        publish(folder, repo)
    assert "\n" not in str(error.value)
    assert not fake_hub.tokens
    check("owner/name")


def test_without_a_token(fake_hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "none"))
    with pytest.raises(InputError, match="hf auth login"):
        publish(folder, "me/d")
    assert not fake_hub.tokens


@pytest.mark.parametrize(
    ("status", "says"),
    [(401, "the token may not write there"), (403, "may not"), (400, "Bad request: no")],
)
def test_a_refusal_is_one_line(status: int, says: str, fake_hub: FakeHub, folder: Path) -> None:
    fake_hub.refuse = status
    with pytest.raises(DownloadError, match=says) as error:
        publish(folder, "me/d")
    assert str(error.value).startswith("cannot upload to me/d: ")
    assert "\n" not in str(error.value)


def test_a_card_that_the_hub_refuses_is_one_line(fake_hub: FakeHub, folder: Path) -> None:
    fake_hub.complaints = [{"message": "license is none", "line": "1"}]
    with pytest.raises(DownloadError, match="license is none") as error:
        publish(folder, "me/d")
    assert "\n" not in str(error.value)
    assert not fake_hub.files


def test_no_network_is_one_line(
    fake_hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="does not answer") as error:
        publish(folder, "me/d")
    assert "\n" not in str(error.value)


def test_only_drafters_are_uploaded(fake_hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="is not a drafter"):
        publish(folder_with(tmp_path / "model", None, "model.safetensors"), "me/d")
    assert not fake_hub.tokens
