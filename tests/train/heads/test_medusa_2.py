"""train/heads/medusa_2.py: what is minimised, that the target stays what it was, and what is
written.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("peft", reason="needs foretell[lora]")

import foretell
from foretell.drafters.heads.networks.folder import build_head, target_shape
from foretell.errors import BadConfig
from foretell.train import answers
from foretell.train.heads import medusa_2
from foretell.train.heads.head import TrainHead, train_head
from foretell.train.heads.head_data import Corpus
from foretell.train.heads.medusa_2 import (
    LiveTeacher,
    Medusa2Run,
    TrainMedusa2,
    joint_loss,
    train_medusa_2,
)
from foretell.train.processes import Processes
from foretell.train.states import write_states
from tests import tiny
from tests.train.test_processes import apart, together

PROMPT, LENGTH = 3, 20
SETTINGS = TrainMedusa2(
    rank=4, alpha=4, tokens=256 * 3, batch=256, micro=128, window=32, common=40, depths=2, warmup=2
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    hf = tiny.llama()
    draw = np.random.default_rng(0)
    texts = []
    with torch.inference_mode():
        for _ in range(40):
            ids = draw.integers(1, 60, PROMPT).tolist()
            rows = []
            while len(ids) < LENGTH:
                top = hf(torch.tensor([ids])).logits[0, -1].log_softmax(-1).topk(3)
                rows.append((top.indices.tolist(), top.values.tolist()))
                ids.append(rows[-1][0][0])
            best, logprobs = (np.array(part) for part in zip(*rows, strict=True))
            tokens = np.array(ids, np.int32)
            texts.append(
                answers.Text(tokens, PROMPT, best.astype(np.int32), logprobs.astype(np.float16))
            )
    path = tmp_path_factory.mktemp("answers") / "00000.safetensors"
    answers.save_texts(path, texts)
    return [path]


def teacher(config: TrainMedusa2 = SETTINGS, moved: float = 0.0) -> LiveTeacher:
    """A fresh target with adapters; `moved`: how far these have been moved from doing nothing."""
    target: Any = tiny.lm().models["target"]
    head = build_head("medusa", target_shape(target))
    torch.manual_seed(1)
    for p in head.parameters():
        torch.nn.init.normal_(p, std=0.05)
    made = LiveTeacher(
        target, medusa_2.add_adapters(target.hf, config), head, torch.arange(target.vocab)
    )
    with torch.no_grad():
        for name, p in made.adapted.named_parameters():
            if "lora_B" in name:
                p.normal_(std=moved or 1e-9).mul_(bool(moved))
    made.adapted.eval()  # no dropout
    return made


def batch_of(teacher: LiveTeacher, files: list[Path]) -> Any:
    return teacher.texts(Corpus(files, None, 32).train[:4], 0.0, 0)


def test_the_loss_is_that_of_the_paper(files: list[Path]) -> None:
    """Beside a loop over texts and places, with whole laws in float32."""
    made = teacher(moved=0.05)
    batch, marks = batch_of(made, files)
    config = dataclasses.replace(SETTINGS, weight=0.05)
    found = float(joint_loss(made, batch, marks, config, step=1).detach())

    hf: Any = made.target.hf
    drift, count = 0.0, 0
    heads = [[0.0, 0] for _ in range(2)]
    for ids in (text.tokens.tolist() for text in Corpus(files, None, 32).train[:4]):
        with torch.no_grad():
            states = hf.get_decoder()(torch.tensor([ids])).last_hidden_state[0]
            now = hf(torch.tensor([ids])).logits[0].log_softmax(-1)
            with made.adapted.disable_adapter():
                was = hf(torch.tensor([ids])).logits[0].log_softmax(-1)
            for place in range(PROMPT, len(ids)):
                drift += float((was[place - 1].exp() * (was[place - 1] - now[place - 1])).sum())
                count += 1
                for depth, block in enumerate(made.head.blocks[:2]):  # type: ignore[index]
                    # Drafted from the state of the token before the newest one.
                    read = place - depth - 2
                    state = block(states[read]) if read >= 0 else block(torch.zeros(32))
                    law = (hf.lm_head.weight @ state).log_softmax(-1)
                    heads[depth][0] -= float(law[ids[place]])
                    heads[depth][1] += 1
    assert drift / count > 0.03  # so that either part shows in the sum
    share = 0.05 * np.sin(np.pi / 2 * 1 / config.steps)
    wanted = drift / count + share * sum(
        0.8 ** (depth + 1) * total / number for depth, (total, number) in enumerate(heads)
    )
    assert found == pytest.approx(wanted, rel=0.01)


def test_adapters_do_nothing_at_first_and_learn_from_the_heads(files: list[Path]) -> None:
    made = teacher()
    batch, marks = batch_of(made, files)
    torch.testing.assert_close(made.states(batch.ids), made.original_states(batch.ids))
    alone = dataclasses.replace(SETTINGS, weight=0.0)
    assert float(joint_loss(made, batch, marks, alone, 1).detach()) == pytest.approx(0, abs=1e-3)
    joint_loss(made, batch, marks, SETTINGS, 1).backward()  # type: ignore[no-untyped-call]
    adapters = {n: p for n, p in made.adapted.named_parameters() if p.requires_grad}
    assert {n.rsplit(".", 3)[-3] for n in adapters} == {"lora_A", "lora_B"}
    assert all(p.grad is not None for p in adapters.values())
    assert any(p.grad.abs().max() > 0 for n, p in adapters.items() if "lora_B" in n)  # type: ignore[union-attr]
    frozen = [p for p in made.target.hf.parameters() if not p.requires_grad]
    assert frozen and all(p.grad is None for p in frozen)


def test_the_target_is_brought_back_to_what_it_said(files: list[Path], tmp_path: Path) -> None:
    """The teacher is the target without adapters: one that moves with them would hold nothing."""
    config = dataclasses.replace(
        SETTINGS, weight=0.0, rate=0.01, tokens=256 * 12, dropout=0.0, decay=0.1
    )
    made = teacher(config, moved=0.2)
    corpus = Corpus(files, None, 32)
    batch, marks = batch_of(made, files)
    before = float(joint_loss(made, batch, marks, config, 1).detach())
    assert before > 0.01
    run = Medusa2Run(tmp_path, config, made, Processes())
    for _ in range(config.steps):
        run.advance_on(corpus)
    assert float(joint_loss(made, batch, marks, config, 1).detach()) < 0.5 * before


def started(files: list[Path], out: Path, config: TrainMedusa2, **more: Any) -> dict[str, Any]:
    return train_medusa_2(tiny.lm(), files, out, config, quiet=True, **more)


@cache
def first_heads(folder: Path, file: Path) -> Path:
    """Heads that were trained apart from the target, as a run of both begins with."""
    lm = tiny.lm()
    model: Any = lm.models["target"]
    taps = (len(model.layout),)
    made = write_states(model, [file], folder / "states", taps, {})
    config = TrainHead(
        kind="medusa", tokens=512, batch=128, micro=128, window=32, common=40, warmup=1
    )
    train_head(lm, [file], made, taps, folder / "first", config, quiet=True)
    return folder / "first" / "head"


# Of transformers, about what peft asks it.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_what_is_written_is_the_tuned_target_and_its_heads(
    files: list[Path], tmp_path: Path
) -> None:
    from peft import PeftModel

    init = first_heads(tmp_path, files[0])
    config = dataclasses.replace(SETTINGS, rate=0.003, weight=0.2)
    report = started(files, tmp_path / "run", config, init=init, merged="bfloat16")
    out = tmp_path / "run"
    assert json.loads((out / "report.json").read_text()) == report
    perplexity = report["perplexity"]
    assert perplexity["after"] != perplexity["before"]
    assert perplexity["after"] == pytest.approx(perplexity["before"], rel=0.1)

    # The merged matrices are those of the target and of the adapters, added up in float32.
    lora = load_file(out / "lora" / "adapter_model.safetensors")
    merged = load_file(out / "model" / "model.safetensors")
    plain = tiny.llama().state_dict()
    changed = 0
    for name, weight in plain.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in lora:
            a, b = lora[f"{key}.lora_A.weight"], lora[f"{key}.lora_B.weight"]
            weight = weight + config.alpha / config.rank * (b @ a)
            changed += 1
        assert torch.equal(merged[name], weight.bfloat16()), name
    assert changed == 2 * 7
    # Other software reads the adapters and gets the same model.
    other = PeftModel.from_pretrained(tiny.llama(), out / "lora")
    ids = torch.tensor([[5, 6, 7, 8]])
    tuned = foretell.load(out / "model", dtype="float32")
    torch.testing.assert_close(
        other(ids).logits[0, -1].detach(),
        tuned.models["target"].score([5, 6, 7, 8])[0],
        atol=0.05,
        rtol=0.05,
    )
    card = (out / "lora" / "README.md").read_text()
    assert "another model" in card and "More Information Needed" not in card
    # The heads draft for the tuned target, and its text is its own.
    method = f"medusa:head={out / 'head'},nodes=6"
    drafted = tuned.generate([5, 6, 7], method, max_new_tokens=16)
    assert drafted.tokens == tuned.generate([5, 6, 7], "plain", max_new_tokens=16).tokens
    assert drafted.stats.drafted > 0


def test_stopped_and_run_again_it_is_the_same_to_the_last_bit(
    files: list[Path], tmp_path: Path
) -> None:
    started(files, tmp_path / "whole", SETTINGS, merged="")
    assert not (tmp_path / "whole" / "model").exists()
    advance = Medusa2Run.advance_on

    def stopping(self: Medusa2Run, corpus: Corpus) -> float:
        if self.step == 2:
            self.save()
            raise KeyboardInterrupt
        return advance(self, corpus)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Medusa2Run, "advance_on", stopping)
        with pytest.raises(KeyboardInterrupt):
            started(files, tmp_path / "parts", SETTINGS, merged="")
    started(files, tmp_path / "parts", SETTINGS, merged="")
    for name in ("lora/adapter_model.safetensors", "head/model.safetensors", "state.safetensors"):
        one, other = ((tmp_path / part / name).read_bytes() for part in ("whole", "parts"))
        assert one == other
    kept = load_file(tmp_path / "whole" / "state.safetensors")
    assert not any("embed_tokens" in name or "base_layer" in name for name in kept)


def test_two_processes_train_what_one_does(files: list[Path], tmp_path: Path) -> None:
    started(files, tmp_path / "alone", SETTINGS, merged="")
    together(_quiet_run, files, tmp_path / "both")
    assert apart(tmp_path / "alone", tmp_path / "both") < 1e-5


def _quiet_run(files: list[Path], out: Path) -> None:
    started(files, out, SETTINGS, merged="")


def test_the_heads_part_grows() -> None:
    grown = {name: [f(done) for done in (0, 0.5, 1)] for name, f in medusa_2.SCHEDULES.items()}
    assert grown["sine"] == pytest.approx([0, 0.5**0.5, 1])
    assert grown["linear"] == [0, 0.5, 1] and grown["constant"] == [1, 1, 1]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("rank", 0, "rank=0: must be between 1"),
        ("dropout", 1.0, "dropout=1.0"),
        ("schedule", "cosine", "schedule='cosine': must be one of sine"),
        ("objective", "mse", "objective='mse'"),
        ("micro", 100, "batch=256: must be a multiple of micro=100"),
    ],
)
def test_bad_settings_are_told(field: str, value: Any, words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        dataclasses.replace(SETTINGS, **{field: value})


def test_what_cannot_be_done_is_told_before_the_work(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadConfig, match="merged='int8': must be one of bfloat16"):
        started(files, tmp_path, SETTINGS, merged="int8")
    deep = dataclasses.replace(SETTINGS, depths=5)
    with pytest.raises(BadConfig, match="depths=5: must be at most 4"):
        started(files, tmp_path, deep)
    monkeypatch.setattr(medusa_2, "find_spec", lambda name: None)
    with pytest.raises(foretell.errors.Unsupported, match=r"pip install 'foretell\[lora\]'"):
        started(files, tmp_path, SETTINGS)
