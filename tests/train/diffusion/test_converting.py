"""What wrote from left to right is made to fill canvases: its mask, its tokenizer, and what
adapters add to it.
"""

from __future__ import annotations

import copy
import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import foretell
from foretell.train.amateur import TrainAmateur, merge_lora, save_lora, with_lora
from foretell.train.diffusion.adapter_merging import main
from foretell.train.diffusion.converting import MASK_TOKEN, convert_model
from foretell.train.diffusion.dlm import TrainDLM, train_dlm
from tests import tiny


def test_a_tokenizer_that_is_shorter_than_the_model_is_filled_up() -> None:
    lm = foretell.wrap(tiny.llama(vocab_size=340), tiny.tokenizer(), None, "tiny")
    reader, tokenizer = convert_model(lm, 0)
    assert reader.mask_id == 340 == tokenizer.mask_token_id and len(tokenizer) == 341
    assert len(reader.hf.get_input_embeddings().weight) == 341


def test_a_token_that_is_called_a_mask_already_becomes_it() -> None:
    words = copy.deepcopy(tiny.tokenizer())
    words.add_tokens([MASK_TOKEN])
    lm = foretell.wrap(tiny.llama(vocab_size=len(words)), words, None, "tiny")
    reader, tokenizer = convert_model(lm, 0)
    assert reader.mask_id == len(words) - 1 == tokenizer.mask_token_id
    assert len(tokenizer) == len(words) and words.mask_token_id is None
    table = reader.hf.get_input_embeddings().weight
    assert len(table) == len(words)
    own = tiny.llama(vocab_size=len(words)).get_input_embeddings().weight
    assert torch.allclose(table[reader.mask_id], own.mean(0))


@pytest.mark.parametrize(("block", "cut"), [(0, 0), (4, 0), (0, 2)])
def test_what_adapters_have_learnt_can_be_added_again(block: int, cut: int, tmp_path: Path) -> None:
    """OUT/lora with the model that they were trained on gives OUT/model."""
    base = tiny.save(tiny.llama(num_hidden_layers=3), tmp_path / "base")
    run = {"block": block, "cut": cut, "rate": 0.01, "examples": 16, "batch": 8}
    config = TrainDLM(rank=2, matrix_rate=0.0, **run)  # type: ignore[arg-type]
    lm = foretell.load(base, dtype="float32", backend="torch")
    train_dlm(tmp_path / "run", config, lm, lists=40, quiet=True)
    made = tmp_path / "made"
    made.mkdir()
    assert main([str(base), str(tmp_path / "run" / "lora"), str(made)]) == 0
    wanted, found = (load_file(f / "model.safetensors") for f in (tmp_path / "run/model", made))
    assert wanted.keys() == found.keys()
    assert all(torch.allclose(found[n].float(), p.float(), atol=5e-3) for n, p in wanted.items())
    one, two = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "run/model", made))
    assert one["canvas"] == two["canvas"] and one["canvas"]["block"] == block
    modes = {stat.S_IMODE(path.stat().st_mode) for path in made.iterdir()}
    assert len(modes) == 1, "all files can be read by whoever can read one"
    model: Any = foretell.load(made).models["target"]
    assert model.mask_id == model.vocab - 1

    told = tmp_path / "run" / "lora" / "adapter_config.json"
    settings = json.loads(told.read_text())
    settings["canvas"]["longest"] = 24
    told.write_text(json.dumps(settings))
    assert main([str(base), str(told.parent), str(made)]) == 0
    model = foretell.load(made).models["target"]
    assert model.longest_canvas == 24


def test_weights_without_a_canvas_are_added_too(tmp_path: Path) -> None:
    base = tiny.save(tiny.llama(), tmp_path / "base")
    hf = tiny.llama()
    settings = TrainAmateur(rank=2, seed=1)
    layers = with_lora(hf, settings)
    for lora in layers.values():
        lora.b.data.normal_()
    save_lora(tmp_path / "lora", layers, settings, "base")
    made = tmp_path / "made"
    made.mkdir()
    assert main([str(base), str(tmp_path / "lora"), str(made)]) == 0
    merge_lora(hf, layers)
    found = load_file(made / "model.safetensors")
    for name, weight in hf.state_dict().items():
        assert torch.equal(found[name], weight.to(torch.bfloat16))


def test_weights_of_another_model_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny.save(tiny.llama(), tmp_path / "base")
    hf, settings = tiny.llama(num_hidden_layers=3), TrainAmateur(rank=2)
    save_lora(tmp_path / "lora", with_lora(hf, settings), settings, "base")
    capsys.readouterr()
    assert main([str(base), str(tmp_path / "lora"), str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "is no linear layer of" in said.splitlines()[-1]
    assert main([str(base), str(tmp_path / "none"), str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err
