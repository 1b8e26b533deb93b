"""From a folder to a model: the right one, or one BadModel line that says what, where and the
cure.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import foretell
from foretell.backends import graphs, openvino
from foretell.errors import BadConfig, BadModel, ForetellError, Unsupported
from foretell.loading.fetch import fetch_shipped
from foretell.loading.load import hand_over
from tests import tiny
from tests.ops.test_memory import resident

CODE = "def add(a, b):\n    return a"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model in one file, with its tokenizer."""
    return tiny.save(tiny.llama(), tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same in several files with an index."""
    path = tiny.save(tiny.llama(), tmp_path / "sharded")
    (path / "model.safetensors").unlink()
    tiny.llama().save_pretrained(path, max_shard_size="30KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


def refusal(source: Any, **options: Any) -> str:
    """The one line of a load that must fail as the user's error."""
    with pytest.raises(ForetellError) as caught:
        foretell.load(source, **options)
    line = str(caught.value)
    assert line and "\n" not in line and caught.value.exit_code == 2
    assert isinstance(caught.value, BadModel | BadConfig | Unsupported)
    return line


def edit(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text("utf-8"))
    (path / "config.json").write_text(json.dumps(config | fields), "utf-8")


def test_a_folder_gives_its_model(folder: Path) -> None:
    lm = foretell.load(folder)
    assert lm.path == folder and lm.tokenizer is not None
    out = lm.generate(CODE, "plain", max_new_tokens=12)
    assert out.tokens == tiny.lm().generate(CODE, "plain", max_new_tokens=12).tokens and out.text
    assert foretell.load(str(folder)).generate(CODE, "plain", max_new_tokens=12).text == out.text


def test_shards_give_the_same(folder: Path, sharded: Path) -> None:
    one, many = (
        foretell.load(path).generate(CODE, "plain", max_new_tokens=12) for path in (folder, sharded)
    )
    assert one.tokens == many.tokens


def test_a_draft_model_comes_along(folder: Path, tmp_path: Path) -> None:
    draft = tiny.save(tiny.relative(tiny.llama()), tmp_path / "draft")
    lm = foretell.load(folder, draft=draft)
    out = lm.generate(CODE, "draft:nodes=4", max_new_tokens=12)
    assert (
        out.stats.drafted > 0 and out.tokens == lm.generate(CODE, "plain", max_new_tokens=12).tokens
    )


def test_other_models_come_along_by_name(folder: Path, tmp_path: Path) -> None:
    relative = tiny.save(tiny.relative(tiny.llama()), tmp_path / "draft")
    small = tiny.llama()
    small.resize_token_embeddings(64)
    small.save_pretrained(tmp_path / "judge")  # another vocabulary, and no tokenizer
    models = {"draft": relative, "judge": str(tmp_path / "judge"), "twin_2": folder}
    lm = foretell.load(folder, models=models, dtype="float64", backend="torch")
    assert list(lm.models) == list(lm.tokenizers) == ["target", "draft", "judge", "twin_2"]
    assert {model.dtype for model in lm.models.values()} == {torch.float64}
    assert lm.models["judge"].vocab == 64 and lm.models["judge"].name.endswith("(judge)")
    assert lm.tokenizers["judge"] is None and lm.tokenizers["target"] is lm.tokenizer
    assert lm.tokenizers["twin_2"](CODE)["input_ids"] == lm.encode(CODE)  # type: ignore[misc]
    short = foretell.load(folder, draft=relative, dtype="float64", backend="torch")
    outs = [x.generate(CODE, "draft:nodes=4", max_new_tokens=12) for x in (lm, short)]
    assert outs[0].tokens == outs[1].tokens and outs[0].stats.drafted == outs[1].stats.drafted


def test_names_of_models_are_checked(folder: Path) -> None:
    for name in ("target", "", "a b", "1st", "a-b"):
        assert f"the name {name!r}" in refusal(folder, models={name: folder})
    assert "give one of them" in refusal(folder, draft=folder, models={"draft": folder})
    assert "no such folder" in refusal(folder, models={"judge": folder / "nowhere"})
    with pytest.raises(BadConfig, match="the name 'target'"):
        foretell.wrap(tiny.llama(), models={"target": tiny.llama()})
    lm = foretell.wrap(tiny.llama(), models={"judge": tiny.gpt2()})
    assert list(lm.models) == ["target", "judge"] and lm.tokenizers["judge"] is None


def test_the_demo_brings_its_draft_model_beside_others(folder: Path) -> None:
    lm = foretell.load("demo", models={"judge": folder}, backend="torch")
    assert set(lm.models) == {"target", "draft", "judge"}
    lm = foretell.load("demo", models={"draft": "demo"}, backend="torch")
    assert lm.models["draft"].vocab == lm.models["target"].vocab
    assert lm.models["draft"].layout == lm.models["target"].layout


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
def test_dtypes(folder: Path, name: str) -> None:
    model = foretell.load(folder, dtype=name).models["target"]
    assert model.dtype == getattr(torch, name)
    assert model.score([1, 2, 3]).dtype == (torch.float64 if name == "float64" else torch.float32)


def test_dtype_auto_is_what_is_stored(tmp_path: Path) -> None:
    path = tiny.save(tiny.llama().to(torch.bfloat16), tmp_path / "half")
    assert foretell.load(path).models["target"].dtype == torch.bfloat16


def test_options_that_cannot_be(folder: Path) -> None:
    assert "dtype='float23'" in refusal(folder, dtype="float23")
    assert "int8 cannot run" in refusal(folder, dtype="int8", device="meta").replace("'", "")
    assert "exact_bits" in refusal(folder, exact_bits=True, dtype="float32")
    assert "device='moon'" in refusal(folder, device="moon")


def test_an_backend_belongs_to_a_kind_of_device(folder: Path) -> None:
    said = refusal(folder, backend="graphs", device="cpu")
    assert "backend='graphs'" in said and "a CUDA GPU" in said
    assert "backend='openvino'" in refusal(folder, backend="openvino", device="meta")
    assert "backend='graphs' with exact_bits=True" in refusal(
        folder, backend="graphs", exact_bits=True
    )
    assert "one of auto, torch, openvino, onnxruntime, native, graphs" in refusal(
        folder, backend="fast"
    )


def test_what_is_handed_over_to_whom() -> None:
    class Fake:
        name, used, reason = "fake", None, ""

        def __init__(self, device: str):
            self.device, self.hf, self.backend = torch.device(device), torch.nn.Linear(1, 1), None

        def use(self, make: object) -> None:
            if self.reason:
                raise LookupError(self.reason)
            self.used = make

    for device, make in (
        ("cuda:1", graphs.make_backend),
        ("cpu", openvino.make_backend),
        ("mps", None),
    ):
        fake: Any = Fake(device)
        hand_over(fake, "auto")
        assert getattr(fake.used, "func", None) is make
    fake = Fake("cuda")
    fake.reason = "experts chosen by Python code"
    assert hand_over(fake, "auto") == (("graphs", "experts chosen by Python code"),)
    with pytest.raises(Unsupported, match=r"backend='graphs' cannot run on fake: .*experts chosen"):
        hand_over(fake, "graphs")


def test_names_that_are_no_folder(folder: Path, tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nowhere")
    assert "no such folder" in refusal("nowhere")
    assert "no such folder" in refusal("a/b/c")
    assert "a file; give the folder" in refusal(folder / "model.safetensors")
    assert "no such file" in refusal("model.gguf")
    assert "no such folder" in refusal(folder, draft=tmp_path / "nowhere")


def test_gguf_files_need_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is installed or not; what the file is not is said without it."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"something else")
    assert "is no GGUF file" in refusal(path)
    key, family = b"general.architecture", b"mystery"
    header = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
    header += struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(family)) + family
    path.write_bytes(header)
    monkeypatch.setattr("foretell.models.gguf.llama_library._library", None)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp", None)
    assert "pip install 'foretell[gguf]'" in refusal(path)
    assert "pip install 'foretell[gguf]'" in refusal("demo", draft=path)


def without_config(path: Path) -> None:
    (path / "config.json").unlink()


def broken_config(path: Path) -> None:
    (path / "config.json").write_text("{", "utf-8")


def no_family(path: Path) -> None:
    edit(path, model_type="no_such_family")


def wrong_sizes(path: Path) -> None:
    edit(path, intermediate_size=40)


def impossible_sizes(path: Path) -> None:
    edit(path, num_attention_heads="four")


def without_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def empty_weights(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"")


def cut_off(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def cut_in_the_header(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:100])


def garbled(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[0:64] = bytes(range(190, 254))
    (path / "model.safetensors").write_bytes(data)


def a_key_short(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def a_key_too_many(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file(
        {**tensors, "model.layers.1.extra.weight": torch.ones(2)},
        path / "model.safetensors",
        {"format": "pt"},
    )


def a_layer_more(path: Path) -> None:
    edit(path, num_hidden_layers=3)


def a_layer_less(path: Path) -> None:
    edit(path, num_hidden_layers=1)


def an_adapter(path: Path) -> None:
    without_config(path)
    beside_an_adapter(path)


def beside_an_adapter(path: Path) -> None:
    (path / "adapter_config.json").write_text('{"peft_type": "LORA"}', "utf-8")


def packed_as_gptq(path: Path) -> None:
    edit(path, quantization_config={"quant_method": "gptq", "bits": 4})


def packed_as_awq(path: Path) -> None:
    edit(path, quantization_config={"quant_method": "awq", "bits": 4})


def packed_by_an_older_tool(path: Path) -> None:
    """It says so in a file of its own, which transformers does not read."""
    (path / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}', "utf-8")
    weights = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    weights[f"{name}.qweight"] = weights.pop(f"{name}.weight").to(torch.int32)
    save_file(weights, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (an_adapter, "merge them by peft"),
        (beside_an_adapter, "merge them by peft"),
        (packed_as_gptq, "quantization_config.group_size is None, and must be a number of inputs"),
        (packed_as_awq, "quantization_config.group_size is None, and must be a number of inputs"),
        (packed_by_an_older_tool, "model.layers.1.mlp.up_proj.qweight is (48, 32) of int32"),
        (without_config, "has no config.json"),
        (broken_config, "cannot be loaded"),
        (no_family, "no_such_family"),
        (wrong_sizes, "cannot be loaded"),
        (impossible_sizes, "cannot be loaded"),
        (without_weights, "no weights"),
        (empty_weights, "model.safetensors: damaged or cut off"),
        (cut_off, "model.safetensors: damaged or cut off"),
        (cut_in_the_header, "model.safetensors: damaged or cut off"),
        (garbled, "model.safetensors: damaged or cut off"),
        (a_key_short, "the weights lack model.layers.1.mlp.up_proj.weight;"),
        (a_key_too_many, "model.layers.1.extra.weight;"),
        (a_layer_more, "the weights lack model.layers.2"),
        (a_layer_less, "the weights have, and its configuration does not, model.layers.1"),
    ],
)
def test_a_damaged_folder_is_one_line(
    folder: Path, damage: Callable[[Path], None], says: str
) -> None:
    damage(folder)
    line = refusal(folder)
    assert says in line and str(folder) in line
    assert says in refusal(tiny.save(tiny.llama(), folder.parent / "whole"), draft=folder)


def test_damaged_shards(sharded: Path) -> None:
    shards = sorted(sharded.glob("model-*.safetensors"))
    data = shards[1].read_bytes()
    shards[1].write_bytes(data[: len(data) - 8])
    assert f"{shards[1].name}: damaged or cut off" in refusal(sharded)
    shards[1].unlink()
    assert f"lacks {shards[1].name} of {len(shards)} shards" in refusal(sharded)
    shards[1].write_bytes(data)
    assert foretell.load(sharded).models["target"].vocab == len(tiny.tokenizer())
    (sharded / "model.safetensors.index.json").write_text("[]", "utf-8")
    assert "index.json: damaged" in refusal(sharded)


class Bomb:
    """Runs when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickled_weights_are_never_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    mark = folder / "ran"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    assert "only pytorch_model.bin, which can run code" in refusal(folder)
    assert not mark.exists()


def test_without_a_tokenizer_ids_still_work(folder: Path) -> None:
    for file in folder.glob("token*"):
        file.unlink()
    with pytest.warns(UserWarning, match="no usable tokenizer"):
        lm = foretell.load(folder)
    assert (
        lm.tokenizer is None
        and len(lm.generate([1, 2, 3], "plain", max_new_tokens=4, ignore_eos=True).tokens) == 4
    )
    with pytest.raises(BadModel, match="no tokenizer"):
        lm.generate(CODE)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["{", "", "[]", "[" * 100_000, "\0"])
def test_a_damaged_tokenizer_is_told_by_its_file(name: str, text: str, folder: Path) -> None:
    (folder / name).write_text(text, "utf-8")
    assert f"{name}: damaged" in refusal(folder)


def test_so_is_one_of_another_build(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {"type": "Unheard"}}', "utf-8")
    assert "tokenizer.json: damaged" in refusal(folder)


def test_remote_code_runs_only_when_asked_for(folder: Path) -> None:
    mark = folder / "ran"
    code = (
        "from pathlib import Path\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(mark)!r}).touch()\n\n\n"
        "class MineConfig(LlamaConfig):\n    model_type = 'mine'\n\n\n"
        "class Mine(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    (folder / "mine.py").write_text(code, "utf-8")
    edit(
        folder,
        model_type="mine",
        auto_map={"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"},
    )
    assert "pass trust_remote_code=True" in refusal(folder)
    assert not mark.exists()


def test_a_draft_of_another_vocabulary(folder: Path, tmp_path: Path) -> None:
    small = tiny.llama()
    small.resize_token_embeddings(64)
    line = refusal(folder, draft=tiny.save(small, tmp_path / "small"))
    assert "has 64 tokens" in line and "one tokenizer" in line


def test_a_hub_id_without_a_connection_is_one_line(tmp_path: Path) -> None:
    script = (
        "import foretell as f\n"
        "try:\n    f.load('nobody/none')\n"
        "except f.ForetellError as e:\n    print(repr(e))"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120
    )
    assert (
        done.returncode == 0
        and done.stdout.startswith("BadModel(")
        and done.stdout.count("\n") == 1
    )
    assert "nobody/none" in done.stdout and "give a local folder" in done.stdout


def test_a_gguf_file_needs_none_of_transformers_models() -> None:
    """They fill 100 MB."""
    code = (
        "import sys, foretell.loading.load, foretell.backends.llama_cpp\n"
        "print(sorted({'transformers.modeling_utils', 'sympy', 'openvino'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is told to let pages go")
@pytest.mark.parametrize(("dtype", "most"), [("auto", 0.65), ("int8", 0.05)])
def test_what_was_joined_or_narrowed_leaves_the_memory(
    dtype: str, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(name: str) -> tuple[float, list[int]]:
        """How much of the file is in memory, and an answer."""
        shutil.copytree(
            fetch_shipped("demo"), tmp_path / name
        )  # other tests may have the file in memory
        lm = foretell.load(tmp_path / name, backend="torch", dtype=dtype)
        file = tmp_path / name / "model.safetensors"
        return resident(file) / file.stat().st_size, lm.generate(
            "def add(a, b):", "plain", max_new_tokens=8
        ).tokens

    ours, tokens = read("ours")
    for module in ("fused", "packed", "smoothing"):
        monkeypatch.setattr(f"foretell.models.decoder.{module}.release_pages", lambda tensors: 0)
    all_of_it, same = read("all")
    assert ours < most and all_of_it > 0.9 and tokens == same
