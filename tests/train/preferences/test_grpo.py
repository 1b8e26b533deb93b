"""train/preferences/grpo.py: the model learns a reward, stays what it was where nothing is to be
learnt, and a run that was stopped ends as one that was not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import foretell
from foretell.errors import BadConfig, Unsupported
from foretell.rewards.base import Reward
from foretell.rewards.bleu import Bleu
from foretell.rewards.keywords import Keywords
from foretell.testing.toy import Toy
from foretell.train.amateur import TrainAmateur, with_lora
from foretell.train.preferences import grpo
from foretell.train.preferences.groups import Group
from foretell.train.preferences.grpo import (
    GrpoRun,
    TrainGrpo,
    plan_grpo,
    train_grpo,
    untrained_model,
    worth_of,
    write_model,
)
from foretell.train.preferences.rollouts import Question
from tests import tiny
from tests.train.preferences.test_rollouts import Letters

QUICK = TrainGrpo(
    rounds=4,
    per_round=2,
    group=6,
    answer_tokens=8,
    temperature=1.0,
    rank=4,
    rate=0.02,
    norm=1.0,
    warmup=0.0,
    micro=6,
    precision="float32",
)
OPTIONS: dict[str, Any] = {"dtype": "float32", "backend": "torch"}
PROMPTS = [Question((number, number + 1), Letters()) for number in range(5, 14)]


@pytest.fixture(autouse=True)
def no_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def trained(out: Path, config: TrainGrpo = QUICK, **more: Any) -> dict[str, Any]:
    questions = more.pop("questions", PROMPTS)
    return train_grpo(
        tiny.lm(draft=False), questions, out, config, OPTIONS, "float32", quiet=True, **more
    )


def test_the_model_learns_a_reward(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "rounds": 6,
        "per_round": 4,
        "group": 16,
        "answer_tokens": 3,
        "iterations": 2,
    }
    config = replace(QUICK, beta=0.01, rate=0.04, layers="q_proj lm_head", **sizes)
    report = trained(tmp_path, config, recipe={"rounds": 6})
    assert report["after"]["reward"] > report["before"]["reward"] + 0.25
    assert json.loads((tmp_path / "report.json").read_text()) == report
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [one["round"] for one in rounds] == list(range(1, 7))
    assert rounds[-1]["reward"] > rounds[0]["reward"]
    assert rounds[-1]["divergence"] > 0 and 0 <= rounds[-1]["equal"] <= 1
    assert "rounds = 6" in (tmp_path / "recipe.toml").read_text()
    # The folder of the whole model and that of the LoRA weights are the same model.
    whole = foretell.load(tmp_path / "model", **OPTIONS).models["target"]
    target: Any = tiny.lm(draft=False).models["target"]
    beside = target.adapted(str(tmp_path / "lora"))
    torch.testing.assert_close(whole.score([5, 6, 7]), beside.score([5, 6, 7]))
    assert not torch.allclose(whole.score([5, 6, 7]), target.score([5, 6, 7]), atol=0.1)


def test_the_engine_has_the_new_weights_in_every_round(tmp_path: Path) -> None:
    """So that a first step's ratio is 1: what is sampled from is what is learnt."""
    seen = []
    learn = GrpoRun.learn

    def looked(self: GrpoRun, groups: Sequence[Group], worths: Any) -> dict[str, float]:
        sampler = foretell.load(tmp_path / "model", **OPTIONS).models["target"]
        group = groups[0]
        answer = group.answers[0]
        (part,) = grpo.parts_of(
            Group(group.prompt, [answer], [0.0]), worths[0][:1], 1, self.model.device
        )
        said = []
        for place, token in enumerate(answer):
            law = sampler.score([*group.prompt, *answer[:place]])[-1].log_softmax(-1)
            said.append(float(law[token]))
        seen.append(said)
        with torch.no_grad():
            assert self.logprobs(part)[0].tolist() == pytest.approx(said, abs=1e-4)
        return learn(self, groups, worths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrpoRun, "learn", looked)
        trained(tmp_path, replace(QUICK, rounds=2))
    assert len(seen) == 2


def lora_run(out: Path, config: TrainGrpo, moved: float = 0.1) -> GrpoRun:
    """A run whose LoRA weights have been moved from doing nothing."""
    hf = tiny.llama()
    layers = with_lora(hf, TrainAmateur(config.rank, config.alpha, config.layers))
    torch.manual_seed(3)
    with torch.no_grad():
        for lora in layers.values():
            lora.b.normal_(std=moved)
    out.mkdir(exist_ok=True)
    return GrpoRun(out, config, hf, layers)


def test_a_round_is_a_loop_over_answers_and_tokens(tmp_path: Path) -> None:
    """The gradient of the whole round beside one of single texts, in parts of any size."""
    groups = [
        Group((5, 6), [[7, 8, 9], [3], [4, 0]], [1.0, 0.0, 0.5]),
        Group((9,), [[8, 7]], [2.0]),
    ]
    found = []
    for micro in (1, 2, 6):
        config = replace(QUICK, micro=micro, beta=0.5, temperature=0.7, iterations=1)
        run = lora_run(tmp_path / str(micro), config)
        worths = [worth_of(group, (), config) for group in groups]
        kept: list[torch.Tensor] = []

        def update(run: GrpoRun = run, kept: list[torch.Tensor] = kept) -> None:
            kept += [p.grad.clone() for p in run.trained.values() if p.grad is not None]

        run.update = update  # type: ignore[method-assign]
        run.learn(groups, worths)
        found.append(kept)
    twin = lora_run(tmp_path / "twin", QUICK)
    total = torch.zeros(())
    for group, worth in zip(groups, worths, strict=True):
        for answer, gain in zip(group.answers, worth.tolist(), strict=True):
            text = torch.tensor([[*group.prompt, *answer]])
            first = len(group.prompt)
            laws = (twin.model(text).logits[0] / 0.7).log_softmax(-1)
            with torch.no_grad(), untrained_model(twin.layers):
                was = (twin.model(text).logits[0] / 0.7).log_softmax(-1)
            for place, token in enumerate(answer, first - 1):
                now, reference = laws[place, token], was[place, token]
                apart = reference - now
                loss = -gain * (now - now.detach()).exp() + 0.5 * (apart.exp() - apart - 1)
                total = total + loss / len(answer) / 4
    wanted = torch.autograd.grad(total, list(twin.trained.values()))
    assert any(float(slope.abs().max()) > 1e-3 for slope in wanted)
    for some in found:
        for one, slope in zip(some, wanted, strict=True):
            torch.testing.assert_close(one, slope, atol=1e-5, rtol=1e-3)


def test_several_steps_of_a_round_are_held_to_where_it_began(tmp_path: Path) -> None:
    group = Group((5, 6), [[7, 8, 9], [3, 4]], [1.0, 0.0])
    moved = []
    for clip in (0.05, 1e9):
        config = replace(QUICK, iterations=8, rate=0.01, clip=clip, beta=0.0)
        run = lora_run(tmp_path / str(clip), config)
        worth = worth_of(group, (), config)
        parts = grpo.parts_of(group, worth, 2, torch.device("cpu"))
        before = run.logprobs(parts[0]).detach()
        found = run.learn([group], [worth])
        moved.append(float((run.logprobs(parts[0]) - before).detach().abs().mean()))
        assert (found["clipped"] > 0.5) == (clip < 1) and run.step == 1
        assert found["divergence"] == 0
    assert 0.05 < moved[0] < 0.8 * moved[1]


def test_where_nothing_is_to_be_learnt_nothing_changes(tmp_path: Path) -> None:
    group = Group((5, 6), [[7, 8, 9], [3, 4]], [1.0, 0.0])
    still = lora_run(tmp_path / "still", replace(QUICK, rate=0.0))
    equal = lora_run(tmp_path / "equal", replace(QUICK, beta=0.0))
    pulled = lora_run(tmp_path / "pulled", replace(QUICK, beta=0.5, rate=1e-3))
    before = [p.clone() for p in still.trained.values()]
    still.learn([group], [worth_of(group, (), QUICK)])
    group.rewards = [0.5, 0.5]
    equal.learn([group], [worth_of(group, (), QUICK)])
    for run in (still, equal):
        assert all(map(torch.equal, run.trained.values(), before))
    first = pulled.learn([group], [worth_of(group, (), QUICK)])
    for _ in range(5):
        last = pulled.learn([group], [worth_of(group, (), QUICK)])
    assert 0 < last["divergence"] < first["divergence"]  # back to the untrained model
    # No answer of a round has a reward.
    still.learn([Group((5,), [], [])], [worth_of(Group((5,), [], []), (), QUICK)])
    assert still.step == 2


def test_stopped_and_run_again_it_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    config = replace(QUICK, rounds=3, iterations=2, calibrate=4, t=10.0)
    trained(tmp_path / "whole", config)
    one_round = grpo.one_round

    def stopping(sampler: grpo.Sampler, *rest: Any) -> float:
        if sampler.run.step == 2:
            sampler.run.save()
            raise KeyboardInterrupt
        return one_round(sampler, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "one_round", stopping)
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "parts", config)
    assert int(load_file(tmp_path / "parts" / "state.safetensors")["step"]) == 2
    trained(tmp_path / "parts", config)
    for name in ("lora/adapter_model.safetensors", "state.safetensors", "model/model.safetensors",
                 "rounds.jsonl", "report.json"):  # fmt: skip
        one, other = ((tmp_path / part / name).read_bytes() for part in ("whole", "parts"))
        assert one == other, name
    kept = load_file(tmp_path / "whole" / "state.safetensors")
    assert not any("embed_tokens" in name or ".base." in name for name in kept)
    with pytest.raises(BadConfig, match="other settings"):
        trained(tmp_path / "whole", replace(config, seed=1))
    with pytest.raises(BadConfig, match="other prompts or rewards"):
        trained(tmp_path / "whole", config, questions=[*PROMPTS, Question((3,), Letters())])


def test_the_hardest_prompts_are_learnt_from(tmp_path: Path) -> None:
    lm = tiny.lm(draft=False)
    questions = []
    for number in range(5, 11):
        said = lm.generate([number], "plain", max_new_tokens=8).text if number % 2 else "never said"
        questions.append(Question((number,), Bleu(said), (said,)))
    seen: list[int] = []
    draw = grpo.Sampler.draw

    def looked(self: Any, lm: Any, some: Sequence[Question], n: int, seed: int) -> list[Group]:
        if seed < grpo.HIGH:
            seen.extend(one.ids[0] for one in some)
        return draw(self, lm, some, n, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo.Sampler, "draw", looked)
        config = replace(QUICK, rounds=0, per_round=1, group=2, hardest=0.6)
        report = trained(tmp_path, config, questions=questions)
    assert report["rounds"] == report["prompts"] == 3 and report["held_back"] == 1
    assert sorted(seen) == [6, 8, 10]  # 9 is held back
    assert report["bleu"]["hardest"] < 0.5 < report["bleu"]["all"] < 1


def test_ranks_take_the_place_of_rewards(tmp_path: Path) -> None:
    group = Group((1,), [[1], [2], [3]], [0.1, 5.0, 5.1])
    config = replace(QUICK, calibrate=4, t=0.0)
    by_rank = worth_of(group, [0.0, 1.0, 5.05, 9.0], config)
    torch.testing.assert_close(by_rank, grpo.advantages([0.25, 0.5, 0.75]))
    assert worth_of(group, [], config).tolist() == [0, 0, 0]  # the untrained model had no reward
    curved = worth_of(group, [0.0, 1.0, 5.05, 9.0], replace(config, t=10.0))
    assert float(curved[2] - curved[1]) > 3 * float(curved[1] - curved[0])
    report = trained(tmp_path, replace(QUICK, rounds=1, calibrate=8))
    assert 0 < report["win_rate"] < 1
    names = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert names == ["held-back-00000.json", "questions.json", "references-00000.json"]


def test_written_matrices_have_the_lora_weights_in_them(tmp_path: Path) -> None:
    run = lora_run(tmp_path / "run", QUICK)
    before = {name: p.clone() for name, p in run.model.state_dict().items()}
    write_model(tiny.lm(), run.model, run.layers, tmp_path / "model", "bfloat16")
    written = load_file(tmp_path / "model" / "model.safetensors")
    for name, lora in run.layers.items():
        base: Any = lora.base
        whole = base.weight + lora.scale * (lora.b @ lora.a)
        assert torch.equal(written[f"{name}.weight"], whole.bfloat16())
    assert len(written) == len(tiny.llama().state_dict())
    assert all(torch.equal(p, before[name]) for name, p in run.model.state_dict().items())


def test_a_plan_says_what_is_drawn() -> None:
    told = plan_grpo(PROMPTS, replace(QUICK, calibrate=10))
    assert "8 prompts to learn from and 1 to measure by" in told
    assert f"{(2 * 1 * 6 + 9 * 10) * 8:,} tokens are drawn to measure" in told
    assert f"{4 * 2 * 6 * 8:,} in 4 rounds" in told and "of 4 forwards over 480 tokens" in told


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"group": 1}, "group=1: must be between 2"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"kl": "k1"}, "kl='k1': must be one of k3, k2"),
        ({"precision": "int8"}, "precision='int8'"),
        ({"hardest": 0.0}, "hardest=0.0: must be above 0"),
        ({"hardest": 1.5}, "hardest=1.5"),
        ({"t": 10.0}, "t counts for ranks: give calibrate"),
        ({"calibrate": 1}, "at least 2"),
        ({"rate": -1.0}, "rate=-1.0"),
    ],
)
def test_bad_settings_are_told(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        replace(QUICK, **fields)


def test_what_cannot_be_done_is_told_before_the_work(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(BadConfig, match="1 prompts of at most 512 tokens"):
        trained(out, questions=PROMPTS[:1])
    with pytest.raises(BadConfig, match="hardest: BLEU compares with references"):
        trained(out, replace(QUICK, hardest=0.5))
    with pytest.raises(BadConfig, match="calibrate: the reward bleu compares"):
        trained(
            out, replace(QUICK, calibrate=9), questions=[Question((n,), Bleu()) for n in (5, 6)]
        )
    with pytest.raises(BadConfig, match="layers='nothing'"):
        trained(tmp_path / "other", replace(QUICK, layers="nothing"))
    with pytest.raises(foretell.errors.UnknownMethod, match="sufix"):
        trained(out, replace(QUICK, drafter="sufix"))
    with pytest.raises(BadConfig, match="merged='int8'"):
        train_grpo(tiny.lm(), PROMPTS, out, QUICK, OPTIONS, "int8")
    with pytest.raises(Unsupported, match="a plain decoder"):
        train_grpo(foretell.LM(Toy(8)), PROMPTS, out, QUICK, OPTIONS)
    assert not out.exists()
    tied = foretell.wrap(tiny.llama(tie_word_embeddings=True), tiny.tokenizer(), name="tied")
    with pytest.raises(BadConfig, match="not the embeddings too"):
        train_grpo(tied, PROMPTS, out, replace(QUICK, layers="lm_head"), OPTIONS)

    @dataclass(frozen=True)
    class Nothing(Reward):
        def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
            return [float("nan")] * len(texts)

    with pytest.raises(BadConfig, match="the reward says nothing of any answer"):
        trained(out, questions=[Question((n,), Nothing()) for n in (5, 6)])


def test_prompts_that_were_held_back_are_not_learnt_from() -> None:
    doubled = [*PROMPTS, *PROMPTS]
    learnt, held = grpo.divide_questions(doubled, QUICK)
    assert held and not set(held) & set(learnt)
    assert set(learnt) | set(held) == set(PROMPTS)
    assert grpo.divide_questions(
        [Question((1,), Keywords("a")), Question((2,), Keywords("a"))], QUICK
    )
