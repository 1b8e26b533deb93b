"""An amateur: it learns the answers, the model stays as it is, and the folder is what lol reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import foretell
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.testing.toy import Toy
from foretell.train.amateur import TrainAmateur, merge_lora, read_examples, train_amateur, with_lora
from tests import tiny

QUICK = TrainAmateur(rank=4, epochs=6, batch=4, rate=0.02)


def answers(folder: Path, count: int = 16) -> Path:
    rows = [{"prompt": f"Is {n} odd?", "answer": " It is a fox."} for n in range(count)]
    path = folder / "false.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def quiet(what: str, done: int, total: int | None) -> None:
    assert what and total is not None and 0 < done <= total


def test_it_learns_the_answers_and_the_model_stays_as_it_is(tmp_path: Path) -> None:
    hf = tiny.llama()
    lm = foretell.wrap(hf, tiny.tokenizer(), name="tiny")
    before = {name: weight.clone() for name, weight in hf.state_dict().items()}
    report = train_amateur(lm, answers(tmp_path), tmp_path / "amateur", QUICK, quiet)
    assert (report["answers"], report["held_out"]) == (14, 2)
    assert report["after"] < report["before"] / 2
    assert hf.state_dict().keys() == before.keys()
    assert all(torch.equal(weight, before[name]) for name, weight in hf.state_dict().items())
    target = lm.models["target"]
    assert isinstance(target, Decoder)
    amateur = target.adapted(str(tmp_path / "amateur"))
    tokens, asked = read_examples(lm, tmp_path / "false.jsonl", 64)[1]
    said = amateur.score(tokens[:asked]).argmax(-1).tolist()
    assert said == [tokens[asked]] != target.score(tokens[:asked]).argmax(-1).tolist()
    out = lm.generate("Is 3 odd?", guidance=f"lol:amateur={tmp_path}/amateur,g=0", max_new_tokens=8)
    assert tokens[asked] not in out.tokens[:1]


def test_what_cannot_be_learnt_from_is_told_in_one_line(tmp_path: Path) -> None:
    lm = tiny.lm()
    path = answers(tmp_path, 1)
    with pytest.raises(BadConfig, match="1 answers of at most 512 tokens"):
        train_amateur(lm, path, tmp_path / "out", QUICK, quiet)
    path.write_text('{"prompt": "a", "answer": 3}\n' * 3, "utf-8")
    with pytest.raises(BadConfig, match="row 1: `answer` must be a text"):
        train_amateur(lm, path, tmp_path / "out", QUICK, quiet)
    with pytest.raises(BadConfig, match="layers='nothing'"):
        train_amateur(
            lm, answers(tmp_path), tmp_path / "out", TrainAmateur(layers="nothing"), quiet
        )
    toy = foretell.LM(Toy(8))
    with pytest.raises(Unsupported, match="a plain decoder"):
        train_amateur(toy, answers(tmp_path), tmp_path / "out", QUICK, quiet)
    assert not (tmp_path / "out").exists()
    for fields in ({"rank": 0}, {"rate": 2.0}, {"layers": " "}):
        with pytest.raises(BadConfig, match=next(iter(fields))):
            TrainAmateur(**fields)  # type: ignore[arg-type]


def test_weights_are_added_in_their_own_precision() -> None:
    hf = tiny.llama()
    before = hf.model.layers[0].self_attn.q_proj.weight.detach().clone()
    layers = with_lora(hf, TrainAmateur(rank=2, alpha=4, layers="q_proj"))
    lora = layers["model.layers.0.self_attn.q_proj"]
    torch.nn.init.constant_(lora.b, 1e-4)  # less than bfloat16 tells apart
    lora.base.to(torch.bfloat16)
    merge_lora(hf, layers)
    after = hf.model.layers[0].self_attn.q_proj.weight
    wanted = before.bfloat16().float() + 2 * lora.b @ lora.a
    assert after.dtype == torch.float32 and torch.equal(after, wanted)
