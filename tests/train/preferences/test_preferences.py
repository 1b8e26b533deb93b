"""train/preferences/preferences.py: what pairs are learnt from, in which order, and what is
written.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import foretell
from foretell.errors import BadConfig, Unsupported
from foretell.testing.toy import Toy
from foretell.train.amateur import with_lora
from foretell.train.preferences.dpo import TrainDpo, read_dpo
from foretell.train.preferences.preferences import (
    Example,
    PairRun,
    Plan,
    Reader,
    answer_logprobs,
    plan_pairs,
    switched_off,
    train_pairs,
)
from tests import tiny

SETTINGS = TrainDpo(rank=4, length=64, epochs=2, batch=4, micro=3, rate=0.01, precision="float32")


def written(folder: Path, count: int = 12) -> Path:
    """Prompts whose better answer is about a fox, and whose other one is about a dog."""
    rows = [
        {
            "prompt": f"Who jumps over {'it' * (n % 3)} {n}?",
            "chosen": f" The quick fox {n}.",
            "rejected": f" The dog{' and the dog' * (n % 4)}.",
        }
        for n in range(count)
    ]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained(folder: Path, out: str = "run", config: TrainDpo = SETTINGS, **more: Any) -> Any:
    return started(tiny.lm(), written(folder), folder / out, config, **more)


def started(
    lm: foretell.LM, path: Path, out: Path, config: TrainDpo = SETTINGS, **more: Any
) -> Any:
    return train_pairs(lm, read_dpo(lm, [path], config), out, config, quiet=True, **more)


def moved(hf: Any) -> Any:
    """LoRA weights on a model that do something."""
    layers = with_lora(hf, SETTINGS.lora)
    torch.manual_seed(3)
    for lora in layers.values():
        torch.nn.init.normal_(lora.b, std=0.1)
    return layers


ROWS: list[Example] = [([5, 6, 7, 8, 9], 2), ([4, 3, 2, 1, 9, 9, 8, 5], 5), ([7, 8], 1)]


def test_log_probabilities_are_those_of_each_answer_alone() -> None:
    hf = tiny.llama()
    sums, counts = answer_logprobs(hf, ROWS)
    for (tokens, asked), found, count in zip(ROWS, sums, counts, strict=True):
        law = hf(torch.tensor([tokens])).logits[0].log_softmax(-1)
        wanted = sum(law[place - 1, tokens[place]] for place in range(asked, len(tokens)))
        torch.testing.assert_close(found, wanted)
        assert count == len(tokens) - asked
    gradient = torch.autograd.grad(sums[1], hf.lm_head.weight)[0]
    alone = torch.autograd.grad(answer_logprobs(hf, ROWS[1:2])[0].sum(), hf.lm_head.weight)[0]
    torch.testing.assert_close(gradient, alone)
    half = answer_logprobs(hf, ROWS, "bfloat16")[0]
    torch.testing.assert_close(half, sums, rtol=0.02, atol=0.02)
    assert not torch.equal(half, sums)


def test_switched_off_it_is_the_model_before() -> None:
    plain, hf = tiny.llama(), tiny.llama()
    layers = moved(hf)
    assert not torch.allclose(answer_logprobs(hf, ROWS)[0], answer_logprobs(plain, ROWS)[0])
    with switched_off(layers.values()):
        found = answer_logprobs(hf, ROWS)[0]
    assert torch.equal(found, answer_logprobs(plain, ROWS)[0]) and not found.requires_grad
    assert not torch.allclose(answer_logprobs(hf, ROWS)[0], found)


def run_of(folder: Path, config: TrainDpo = SETTINGS, count: int = 6) -> PairRun:
    hf = tiny.llama().requires_grad_(False)
    pairs = [(([5, 6, *range(7, 8 + n % 3)], 2), ([5, 6, 9 + n], 2)) for n in range(count)]
    return PairRun(folder, config, hf, with_lora(hf, config.lora), pairs)


def test_every_pair_is_seen_once_a_round_and_steps_are_full(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert run.config.steps == 3  # two rounds of 6 pairs, 4 at a time
    seen = [json.dumps(pair) for step in range(3) for pair in run.step_pairs(step)]
    assert len(seen) == 12 and all(seen.count(pair) == 2 for pair in seen)
    rounds = [pair for step in range(6) for pair in run.step_pairs(step)]
    assert rounds[:12] != rounds[12:] and run.step_pairs(1) == run_of(tmp_path).step_pairs(1)


def test_a_step_s_gradient_does_not_depend_on_the_forwards(tmp_path: Path) -> None:
    gradients = []
    for micro in (1, 4):
        run = run_of(tmp_path / str(micro), dataclasses.replace(SETTINGS, micro=micro))
        run.update = lambda: None  # type: ignore[method-assign]
        run.advance_on()
        gradients.append([p.grad for p in run.trained.values()])
    assert len(gradients[0]) == 2 * 7 * 2
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_of_what_is_read_the_unfit_is_left_out_and_counted() -> None:
    reader = Reader(tiny.lm(), 24, "here")
    reader.add("The dog", " is", " was")
    reader.add("The dog", " is", " is")
    reader.add("The dog", " is" * 40, " was")
    assert reader.left_out == {"of equal answers": 1, "too long": 1}
    (better, other), end = reader.pairs[0], tiny.tokenizer().eos_token_id
    assert better[0][: better[1]] == other[0][: other[1]] == reader.lm.encode("The dog")
    assert reader.lm.encode(" is", special=False) == better[0][better[1] : -1]
    assert better[0][-1] == other[0][-1] == end
    with pytest.raises(BadConfig, match=r"here: 1 pairs .* 24 tokens .*1 of equal answers; 1 too"):
        reader.parts()
    reader.pairs *= 10
    learnt, held_out = reader.parts()
    assert (len(learnt), len(held_out)) == (8, 2)


def test_what_a_run_takes_is_told() -> None:
    lm = tiny.lm()
    lm.measure()
    costs = lm.engine.costs_of(lm.models["target"])
    told = plan_pairs([(ROWS[0], ROWS[1])] * 6, SETTINGS, costs)
    assert told.startswith("6 pairs, 3 steps over 156 tokens with their gradients: about 0.0 hours")


def test_a_rate_of_0_leaves_the_weights_to_the_last_bit(tmp_path: Path) -> None:
    still = dataclasses.replace(SETTINGS, rate=0.0)
    report = trained(tmp_path, config=still, merged="float32")
    assert report["after"] == report["before"]
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in tiny.llama().state_dict().items())


def test_what_is_written_is_the_target_with_the_lora(tmp_path: Path) -> None:
    lm = tiny.lm()
    target: Any = lm.models["target"]
    before = copy.deepcopy(target.hf.state_dict())
    path, out = written(tmp_path), tmp_path / "run"
    report = started(lm, path, out, merged="float32", recipe={"a": 1})
    assert json.loads((out / "report.json").read_text()) == report
    assert (out / "recipe.toml").read_text() == "a = 1\n"
    assert target.hf.state_dict().keys() == before.keys()
    assert all(torch.equal(p, before[name]) for name, p in target.hf.state_dict().items())
    lora = target.adapted(str(out / "lora"))
    merged = foretell.load(out / "model", dtype="float32").models["target"]
    tokens = lm.encode("Who jumps?")
    torch.testing.assert_close(merged.score(tokens), lora.score(tokens), atol=1e-4, rtol=1e-4)
    assert float((merged.score(tokens) - target.score(tokens)).abs().max()) > 0.05
    started(lm, path, tmp_path / "other", merged="")
    assert not (tmp_path / "other" / "model").exists()


def test_stopped_and_run_again_it_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    half = dataclasses.replace(SETTINGS, precision="bfloat16")
    trained(tmp_path, "whole", half)
    advance = PairRun.advance_on

    def stopping(self: PairRun) -> float:
        if self.step == 2:
            self.save()
            raise KeyboardInterrupt
        return advance(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PairRun, "advance_on", stopping)
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path, "parts", half)
    trained(tmp_path, "parts", half)
    names = ("lora/adapter_model.safetensors", "model/model.safetensors", "state.safetensors")
    for name in (*names, "report.json"):
        one, other = ((tmp_path / part / name).read_bytes() for part in ("whole", "parts"))
        assert one == other, name
    kept = load_file(tmp_path / "whole" / "state.safetensors")
    assert {name.rpartition(".")[2] for name in kept if name.startswith("model.")} == {"a", "b"}


def test_a_run_does_not_go_on_with_other_pairs_or_settings(tmp_path: Path) -> None:
    trained(tmp_path, merged="")
    with pytest.raises(BadConfig, match="holds a run with other settings"):
        started(tiny.lm(), written(tmp_path, 11), tmp_path / "run")
    other = dataclasses.replace(SETTINGS, beta=0.2)
    with pytest.raises(BadConfig, match="holds a run with other settings"):
        trained(tmp_path, config=other)


def test_the_rate_rises_over_its_share_and_falls_to_0() -> None:
    pairs = [(ROWS[0], ROWS[1])] * 40
    config = dataclasses.replace(SETTINGS, epochs=1, batch=2, warmup=0.25)
    found = Plan.of(config, pairs)
    assert (found.steps, found.warmup, found.decay) == (20, 5, 0.75)
    assert Plan.of(dataclasses.replace(config, warmup=0.0), pairs).warmup == 1


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("rank", 0, "rank=0: must be between 1"),
        ("layers", " ", "layers=' '"),
        ("length", 1, "length=1: must be between 2"),
        ("batch", 0, "batch=0"),
        ("micro", 0, "micro=0"),
        ("epochs", 0, "epochs=0"),
        ("rate", -1.0, "rate=-1.0"),
        ("warmup", 2.0, "warmup=2.0"),
        ("precision", "int8", "precision='int8': must be bfloat16 or float32"),
        ("beta", -0.1, "beta=-0.1"),
        ("sft", -1.0, "sft=-1.0"),
    ],
)
def test_bad_settings_are_told(field: str, value: Any, words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        dataclasses.replace(SETTINGS, **{field: value})


def test_what_cannot_be_done_is_told_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="merged='int8': must be one of bfloat16"):
        trained(tmp_path, merged="int8")
    with pytest.raises(BadConfig, match="layers='nothing'"):
        trained(tmp_path, config=dataclasses.replace(SETTINGS, layers="nothing"))
    toy = foretell.LM(Toy(400), tiny.tokenizer())
    with pytest.raises(Unsupported, match="a plain decoder"):
        started(toy, written(tmp_path), tmp_path / "run")
    assert not (tmp_path / "run").exists()
