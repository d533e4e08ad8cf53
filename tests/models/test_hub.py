"""Models by their hub ids, with the real `huggingface_hub` and a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from ostinato.cli.main import app
from ostinato.device import Device
from ostinato.errors import DownloadError, ModelError, NotAvailableError
from ostinato.models.decoder import Decoder
from ostinato.models.files import store
from ostinato.models.files.hub import HubName, hub_name
from ostinato.models.files.open import open_checkpoint
from tests.models.model_files import FAMILIES, write_folder, write_gguf

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Repositories by name, their files by path; as much of the hub's protocol as reading takes."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    cut: int | None = None
    """Bytes after which a file's download breaks off."""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        self.asked.append("/".join(parts))
        missing = 404, {"X-Error-Code": "RepoNotFound"}, b""
        if parts[:2] == ["api", "models"]:
            files = self.repos.get("/".join(parts[2:4]))
            if files is None:
                return missing
            if parts[4:5] == ["tree"]:
                entries: Any = [
                    {"type": "file", "path": name, "size": len(data), "oid": digest(data)}
                    for name, data in files.items()
                ]
            else:
                names = [{"rfilename": name} for name in files]
                entries = {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": names}
                entries |= {"private": False, "tags": [], "downloads": 0, "likes": 0}
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        files = self.repos.get("/".join(parts[:2]))
        if files is None or parts[2:3] != ["resolve"]:
            return missing
        data = files.get("/".join(parts[4:]))
        if data is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        head = {"ETag": f'"{digest(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        return 200, head, data


def digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.reply(body=False)

        def do_GET(self) -> None:
            self.reply(body=True)

        def reply(self, *, body: bool) -> None:
            status, headers, data = fake.answer(self.path)
            start = 0
            wanted = self.headers.get("Range")
            if body and wanted and status == 200:
                start = int(wanted.removeprefix("bytes=").partition("-")[0])
                status = 206
                headers = {**headers, "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data) - start)}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                sent = data[start:]
                if fake.cut is not None and "/resolve/" in self.path:
                    self.wfile.write(sent[: fake.cut])
                    self.close_connection = True
                    return
                self.wfile.write(sent)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield fake
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(path, config=FAMILIES["qwen3"]).read_bytes()


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_repository_with_one_gguf_file_decodes(
    hub: FakeHub, gguf: bytes, host_device: Device, tmp_path: Path
) -> None:
    hub.repos["org/one-GGUF"] = {"README.md": b"#", ".gitattributes": b"", "one-Q8_0.gguf": gguf}
    path = store.resolve("org/one-GGUF")
    assert path.read_bytes() == gguf
    assert not any("README" in asked for asked in hub.asked if "resolve" in asked)
    (tmp_path / "same.gguf").write_bytes(gguf)
    tokens = [5, 9, 200, 7]
    with Decoder(host_device, path) as ours, Decoder(host_device, tmp_path / "same.gguf") as same:
        assert ours.prefill(tokens) == same.prefill(tokens)
        np.testing.assert_array_equal(ours.logits(), same.logits())
    # It is here now: nothing is asked any more, and no network is needed.
    hub.asked.clear()
    assert store.resolve("org/one-GGUF", download=False) == path
    assert not hub.asked
    hub.repos.clear()
    assert store.resolve("org/one-GGUF") == path


@pytest.mark.parametrize(
    "files",
    [
        ("m-Q2_K-00001-of-00001.gguf", "m-Q8_0-00001-of-00001.gguf"),
        ("m-Q2_K-00001-of-00001.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"),
    ],
)
def test_models_of_one_part_each_are_several(hub: FakeHub, files: tuple[str, ...]) -> None:
    """The first of them was taken, whatever it was."""
    hub.repos["org/parts"] = dict.fromkeys(files, b"x")
    with pytest.raises(ModelError, match=f"has {len(files)} GGUF files; name one"):
        store.resolve("org/parts")


MANY = {"m-Q4_K_M.gguf": b"a", "m-Q4_K_S.gguf": b"b", "m-Q8_0.gguf": b"c", "sub/m-BF16.gguf": b"d"}


@pytest.mark.parametrize(
    ("choice", "data"),
    [
        ("Q4_K_M", b"a"),
        ("q8_0", b"c"),
        ("BF16", b"d"),
        ("m-Q4_K_S.gguf", b"b"),
        ("sub/m-BF16.gguf", b"d"),
    ],
)
def test_a_file_is_chosen_by_its_kind_or_name(hub: FakeHub, choice: str, data: bytes) -> None:
    hub.repos["org/many"] = dict(MANY)
    path = store.resolve(f"org/many:{choice}")
    assert path.read_bytes() == data
    assert store.resolve(f"org/many:{choice}", download=False) == path
    fetched = {asked.partition("resolve/main/")[2] for asked in hub.asked if "resolve" in asked}
    assert len(fetched) == 1, "no other file is fetched"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("org/many", "has 4 GGUF files; name one as org/many:file.gguf: m-Q4_K_M.gguf, m-Q4"),
        ("org/many:Q4_K", "has no GGUF file of Q4_K: m-Q4"),
        ("org/many:Q5_0", "has no GGUF file of Q5_0: m-Q4"),
        ("org/many:n.gguf", "has no file n.gguf: m-Q4"),
        ("org/parts", "has no file x-00002-of-00003.gguf, one of 3 parts of a model: x-00001"),
        ("org/parts:x-00003-of-00003.gguf", "has no file x-00002-of-00003.gguf, one of 3 parts"),
        ("org/none", "has neither a GGUF file nor config.json and"),
        ("org/hostile", "has neither a GGUF file nor config.json and"),
    ],
)
def test_what_cannot_be_chosen_is_said(hub: FakeHub, name: str, said: str) -> None:
    parts = {f"x-0000{i}-of-00003.gguf": b"" for i in (1, 3)}
    hostile = {"../../up.gguf": b"", "/etc/x.gguf": b"", "a b.gguf": b"", "x\x1b[2J.gguf": b""}
    hub.repos |= {"org/many": dict(MANY), "org/parts": parts, "org/none": {"pytorch.bin": b""}}
    hub.repos["org/hostile"] = hostile
    with pytest.raises(ModelError) as caught:
        store.resolve(name)
    assert said in str(caught.value)
    assert not any("resolve" in asked for asked in hub.asked), "nothing is fetched"


@pytest.mark.parametrize("choice", ["", ":Q8_0", ":Q8_0/m-Q8_0-00002-of-00003.gguf"])
def test_all_parts_of_a_gguf_model_are_fetched(hub: FakeHub, tmp_path: Path, choice: str) -> None:
    write_gguf(tmp_path / "m-Q8_0.gguf", split=8)
    made = {f"Q8_0/{file.name}": file.read_bytes() for file in tmp_path.glob("*.gguf")}
    assert len(made) == 3
    hub.repos["org/parts"] = {**made, **({"n-Q4_0.gguf": b"x"} if choice else {})}
    path = store.resolve(f"org/parts{choice}")
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == {
        name.removeprefix("Q8_0/"): data for name, data in made.items()
    }
    open_checkpoint(path).close()
    assert store.resolve(f"org/parts{choice}", download=False) == path
    # A download that was left off is not taken for the whole.
    path.with_name("m-Q8_0-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"m-Q8_0-00003-of-00003\.gguf"):
        store.resolve(f"org/parts{choice}", download=False)
    assert store.resolve(f"org/parts{choice}") == path
    open_checkpoint(path).close()


def test_a_folder_of_safetensors(hub: FakeHub, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "made", config=FAMILIES["qwen2"], shards=2)
    hub.repos["org/folder"] = {**files_of(folder), "pytorch_model.bin": b"x", "m.gguf": b"y"}
    path = store.resolve("org/folder")
    assert {file.name for file in path.iterdir()} == set(files_of(folder))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.qkv_bias
    assert store.resolve("org/folder", download=False) == path
    # A download that was left off is not taken for the whole.
    next(path.glob("*00002.safetensors")).unlink()
    with pytest.raises(DownloadError, match=r"00002\.safetensors"):
        store.resolve("org/folder", download=False)
    assert store.resolve("org/folder") == path
    open_checkpoint(path).close()


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_that_are_there_twice_are_fetched_once(
    hub: FakeHub, tmp_path: Path, shards: int
) -> None:
    """Mistral's repositories repeat them in the maker's own form, or in another folder."""
    made = files_of(write_folder(tmp_path / "made", config=FAMILIES["mistral"], shards=shards))
    more = ("consolidated.safetensors", "original/model.safetensors", "onnx/a.safetensors")
    hub.repos["org/twice"] = {**made, **dict.fromkeys(more, b"x")}
    path = store.resolve("org/twice")
    assert {file.name for file in path.iterdir()} == {*made}
    assert store.resolve("org/twice", download=False) == path
    open_checkpoint(path).close()


def test_one_gguf_file_beside_a_config_is_found_again(hub: FakeHub, gguf: bytes) -> None:
    hub.repos["org/both"] = {"m.gguf": gguf, "config.json": b"{}", "README.md": b"x"}
    path = store.resolve("org/both")
    assert store.resolve("org/both", download=False) == path


def test_a_small_file_that_was_left_off_is_missed(hub: FakeHub, tmp_path: Path) -> None:
    """Without the template, or the tokens that end an answer, the model would answer otherwise."""
    made = files_of(write_folder(tmp_path / "made", config=FAMILIES["mistral"]))
    hub.repos["org/left"] = {**made, "chat_template.jinja": b"x"}
    path = store.resolve("org/left")
    (path / "chat_template.jinja").unlink()
    with pytest.raises(DownloadError):
        store.resolve("org/left", download=False)
    assert store.resolve("org/left") == path and (path / "chat_template.jinja").exists()


def test_a_lone_file_of_another_name_is_fetched(hub: FakeHub, tmp_path: Path) -> None:
    made = files_of(write_folder(tmp_path / "made", config=FAMILIES["mistral"]))
    made["weights.safetensors"] = made.pop("model.safetensors")
    hub.repos["org/other"] = made
    open_checkpoint(store.resolve("org/other")).close()


def test_what_the_hub_refuses_is_said(hub: FakeHub) -> None:
    with pytest.raises(DownloadError, match="'org/gone' cannot be fetched from the hub: Repo"):
        store.resolve("org/gone")
    with pytest.raises(ModelError, match="'org/gone' cannot be fetched"):
        store.resolve("org/gone", download=False)
    assert not any("resolve" in asked for asked in hub.asked)


def test_a_download_that_breaks_off_leaves_no_model(
    hub: FakeHub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/one"] = {"m.gguf": gguf}
    hub.cut = 1000
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the hub's own tries
    with pytest.raises(DownloadError):
        store.resolve("org/one")
    with pytest.raises(ModelError):
        store.resolve("org/one", download=False)
    hub.cut = None
    assert store.resolve("org/one").read_bytes() == gguf


def test_the_command_pulls_it(hub: FakeHub, gguf: bytes) -> None:
    hub.repos["org/one"] = {"m-Q8_0.gguf": gguf}
    done = CliRunner().invoke(app, ["model", "pull", "org/one:Q8_0"])
    assert done.exit_code == 0, done.output
    assert Path(done.output.strip()).read_bytes() == gguf


def test_hub_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(NotAvailableError, match=r'pip install "ostinato\[hub\]"'):
        store.resolve("org/name")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("org/name", HubName("org/name")),
        ("o.r-g/n_a.m-e", HubName("o.r-g/n_a.m-e")),
        ("org/name:Q4_K_M", HubName("org/name", "Q4_K_M")),
        ("org/name:a/b-Q4.gguf", HubName("org/name", "a/b-Q4.gguf")),
        ("org/name.gguf", None),
        ("./org/name", None),
        ("org/name/file.gguf", None),
        ("org/name:", None),
        ("org/name:../x.gguf", None),
        ("org/name:/x.gguf", None),
        ("C:\\x", None),
        ("name", None),
        ("org/name:Q4 K", None),
    ],
)
def test_what_is_an_id(text: str, wanted: HubName | None) -> None:
    assert hub_name(text) == wanted


def test_a_choice_never_leaves_the_repository(hub: FakeHub) -> None:
    hub.repos["org/x"] = {"a.gguf": b""}
    with pytest.raises(ModelError, match="has no file"):
        store.resolve("org/x:a/../../../b.gguf")
