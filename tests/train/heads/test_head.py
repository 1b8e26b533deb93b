"""The trainer of heads: what it learns from, that a perfect head scores 1, and that runs go on."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from foretell.drafters.heads.networks.anchored import Anchored
from foretell.drafters.heads.networks.base import Drafted, Head, Texts
from foretell.drafters.heads.networks.falcon import Falcon
from foretell.drafters.heads.networks.folder import (
    build_head,
    head_kinds,
    load_head,
    save_head,
    target_shape,
)
from foretell.drafters.heads.networks.output import Output
from foretell.errors import BadConfig
from foretell.models.decoder.decoder import Decoder
from foretell.ops.fingerprint import fingerprint
from foretell.train import answers, states
from foretell.train.heads import anchored
from foretell.train.heads.head import (
    TrainHead,
    begin_head,
    head_loss,
    read_head,
    taps_of,
    train_head,
)
from foretell.train.heads.head_data import Corpus, Known, Teacher, answer_places
from foretell.train.heads.head_report import hit_shares, mean_overlaps
from tests.models.decoder.families import tiny

PROMPT, LENGTH = 4, 24
SETTINGS = TrainHead(tokens=512, batch=64, micro=64, window=32, common=60, depths=2, warmup=2)


@cache
def target() -> Decoder:
    model = Decoder(tiny("llama"), "tiny")
    model.tokenizer = None
    return model


@torch.inference_mode()
def greedy(prompt: list[int]) -> answers.Text:
    """The target's best answer, as a file of answers has it."""
    tokens = list(prompt)
    best, logprobs = [], []
    for _ in range(LENGTH - PROMPT):
        row = target().score(tokens)[0].log_softmax(-1)
        top = row.topk(4)
        best.append(top.indices.tolist())
        logprobs.append(top.values.tolist())
        tokens.append(best[-1][0])
    return answers.Text(
        np.array(tokens, np.int32), PROMPT, np.array(best, np.int32), np.array(logprobs, np.float16)
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Path]]:
    folder = tmp_path_factory.mktemp("answers")
    draw = np.random.default_rng(0)
    written = []
    for number, count in enumerate((33, 7)):
        path = folder / f"{number}.safetensors"
        texts = [greedy(draw.integers(0, 90, PROMPT).tolist()) for _ in range(count)]
        answers.save_texts(path, texts)
        written.append(path)
    taps = taps_of("eagle3", target_shape(target()))
    told = fingerprint(target())
    return written, states.write_states(target(), written, folder / "states", taps, told)


def taps() -> tuple[int, ...]:
    return taps_of("eagle3", target_shape(target()))


class Perfect(Head):
    """The target as its own head: at every depth it gives the state that the target has there.

    `late`: it is a place after.
    """

    kind = "eagle3"

    def __init__(self, late: int = 0):
        super().__init__(build_head("eagle3", target_shape(target())).config)
        self.late = late
        self.nothing = torch.nn.Parameter(torch.zeros(1))

    @property
    def taps(self) -> tuple[int, ...]:
        return build_head("eagle3", target_shape(target())).taps

    def unroll_depths(self, texts: Texts, depths: int) -> Iterator[Drafted]:
        for depth in range(depths):
            by = depth - self.late
            moved = texts.shift_left(texts.finals, by) if by >= 0 else texts.finals.roll(1, 1)
            yield Drafted(depth, moved + self.nothing)


def teacher_of(head: Head, kept: int = 0) -> Teacher:
    vocab = target().vocab
    return Teacher(target(), taps(), head, torch.arange(kept or vocab))


def test_the_target_as_its_own_head_is_always_right(files: Any) -> None:
    corpus = Corpus(*files, window=32)
    right = hit_shares(Perfect(), corpus.held_back, teacher_of(Perfect()), 4, 64)
    # States are kept in bfloat16, and a random target's best tokens are hardly ahead of others.
    assert right[0] > 0.85 and right[3] > 0.6
    late = hit_shares(Perfect(late=1), corpus.held_back, teacher_of(Perfect()), 4, 64)
    assert late[0] < 0.5 and late[3] < 0.1


def test_without_greedy_answers_there_are_no_hits(files: Any) -> None:
    corpus = Corpus(*files, window=32)
    drawn = [dataclasses.replace(text, top_tokens=text.top_tokens + 1) for text in corpus.held_back]
    assert hit_shares(Perfect(), drawn, teacher_of(Perfect()), 4, 64) == []


def test_overlaps_are_the_chances_that_a_drawn_token_is_accepted(files: Any) -> None:
    corpus = Corpus(*files, window=32)
    perfect = Perfect()
    shares = mean_overlaps(perfect, corpus.held_back, teacher_of(perfect), 3, 64)
    assert shares == pytest.approx([1, 1, 1], abs=1e-3)
    # A head that drafts 30 tokens alone cannot share more than the target gives these.
    few = teacher_of(perfect, kept=30)
    batch, marks = few.texts(corpus.held_back, 0.0, 0)
    row, place = answer_places(marks, 0).T
    laws = (batch.finals[row, place].float() @ few.full_matrix.float().T).softmax(-1)
    given = float(laws[:, :30].sum(-1).mean())
    assert mean_overlaps(perfect, corpus.held_back, few, 1, 64) == [pytest.approx(given, abs=0.01)]
    late = Perfect(late=1)
    assert mean_overlaps(late, corpus.held_back, teacher_of(late), 1, 64)[0] < 0.9


def test_its_loss_is_nothing_and_that_of_another_place_is_not(files: Any) -> None:
    corpus = Corpus(*files, window=32)
    for late, low, high in ((0, -1e-6, 0.02), (1, 0.5, 1e9)):
        head = Perfect(late)
        teacher = teacher_of(head)
        batch, marks = teacher.texts(corpus.train[:3], 0.0, 0)
        loss = float(head_loss(head, batch, marks, teacher, SETTINGS).detach())
        assert low <= loss <= high


def test_nothing_is_learnt_from_prompts(files: Any) -> None:
    """What stands in a prompt moves the loss through the states alone."""
    corpus = Corpus(*files, window=32)
    head = build_head("eagle3", target_shape(target()))
    teacher = teacher_of(head)
    _, marks = teacher.texts(corpus.train[:2], 0.0, 0)
    for depth in range(3):
        for row, place in answer_places(marks, depth).tolist():
            assert PROMPT <= place + depth + 1 < len(corpus.train[row].tokens)
        assert len(answer_places(marks, depth)) == 2 * (LENGTH - PROMPT) - 2 * max(
            0, depth - PROMPT + 1
        )


def test_what_is_held_back_is_not_trained_on(files: Any) -> None:
    corpus = Corpus(*files, window=32)
    assert len(corpus.held_back) == 2 and len(corpus.train) == 38
    trained = {text.tokens.tobytes() for text in corpus.train}
    assert not any(text.tokens.tobytes() in trained for text in corpus.held_back)


def test_each_state_belongs_to_its_token(files: Any) -> None:
    corpus = Corpus(*files, window=32)
    head = build_head("eagle3", target_shape(target()))
    batch, _ = teacher_of(head).texts(corpus.train[:1], 0.0, 0)
    text = corpus.train[0].tokens.tolist()
    with torch.inference_mode():
        out = target().hf(torch.tensor([text]), output_hidden_states=True)
    for number, tap in enumerate(head.taps):
        want = out.hidden_states[tap][0]
        got = batch.features[0, 1 : len(text)].chunk(3, -1)[number].float()
        torch.testing.assert_close(got, want[:-1], atol=0.02, rtol=0.02)
    assert not batch.features[0, 0].any()
    torch.testing.assert_close(
        batch.finals[0, : len(text)].float(), out.hidden_states[-1][0], atol=0.05, rtol=0.05
    )


def run(files: Any, out: Path, settings: TrainHead, **more: Any) -> dict[str, Any]:
    lm: Any = SimpleNamespace(models={"target": target()})
    return train_head(lm, *files, taps(), out, settings, quiet=True, **more)


def test_one_batch_is_learnt_by_heart(files: Any, tmp_path: Path) -> None:
    corpus = Corpus(*files, window=32)
    few = Corpus(*files, window=32)
    few.train = corpus.train[:2]
    torch.manual_seed(0)
    head = build_head("eagle3", target_shape(target()))
    head.take_weights(target())
    teacher = teacher_of(head)
    optimiser = torch.optim.AdamW(head.parameters(), lr=0.01)
    for _ in range(120):
        batch, marks = teacher.texts(few.train, 0.0, 0)
        loss = head_loss(head, batch, marks, teacher, SETTINGS)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert hit_shares(head, few.train, teacher, 1, 64)[0] > 0.75


@pytest.mark.parametrize("kind", ["eagle3", "falcon"])  # the latter with dropout, and glancing
def test_stopped_and_run_again_it_is_the_same_to_the_last_bit(
    kind: str, files: Any, tmp_path: Path
) -> None:
    settings = dataclasses.replace(SETTINGS, kind=kind, tokens=64 * 6)
    report = run(files, tmp_path / "whole", settings)
    assert report["tokens_seen"] == 64 * 6 and len(report["hits"]) == 5

    from foretell.train.heads.head import HeadRun

    right = HeadRun.advance_on
    steps = 0

    def stopping(self: HeadRun, *args: Any) -> float:
        nonlocal steps
        steps += 1
        if steps == 4:
            self.save()
            raise KeyboardInterrupt
        return right(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadRun, "advance_on", stopping)
        with pytest.raises(KeyboardInterrupt):
            run(files, tmp_path / "parts", settings)
    run(files, tmp_path / "parts", settings)
    one, other = (
        load_head(tmp_path / name / "head", target())[0].state_dict() for name in ("whole", "parts")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert json.loads((tmp_path / "parts" / "report.json").read_text())["hits"] == report["hits"]


def test_a_head_is_told_how_far_training_is_and_reads_what_it_is_shown(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    seen: list[Any] = []
    glance, unroll = Falcon.glance, Falcon.unroll_depths

    def spy(self: Falcon, texts: Texts, answers: Any, best: Any, progress: float) -> Any:
        told.append(progress)
        shown = glance(self, texts, answers, best, progress)
        # The output matrix as training has it: of a state that is the target's it finds its token.
        assert int(best(texts.finals[answers]).max()) < SETTINGS.common
        seen.append(shown)
        return shown

    def reading(self: Falcon, texts: Texts, depths: int) -> Any:
        if texts.shown is not None:
            assert texts.shown is seen[-1] and texts.shown.any()
            seen[-1] = "read"
        return unroll(self, texts, depths)

    monkeypatch.setattr(Falcon, "glance", spy)
    monkeypatch.setattr(Falcon, "unroll_depths", reading)
    run(files, tmp_path, dataclasses.replace(SETTINGS, kind="falcon", tokens=64 * 4))
    assert told == [0.0, 0.25, 0.5, 0.75] and seen == ["read"] * 4


def test_a_head_goes_on_from_another(files: Any, tmp_path: Path) -> None:
    run(files, tmp_path / "first", SETTINGS)
    settings = dataclasses.replace(SETTINGS, tokens=64, matrix_rate=0.0, other_rate=0.0, common=30)
    run(files, tmp_path / "second", settings, init=tmp_path / "first" / "head")
    first, kept = load_head(tmp_path / "first" / "head", target())
    second, again = load_head(tmp_path / "second" / "head", target())
    assert kept is not None and again is not None and torch.equal(kept, again)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])


def test_bad_settings_are_told() -> None:
    for field, value, words in (
        ("objective", "mse", "objective='mse'"),
        ("depths", 65, "depths=65"),
        ("keep", 0.0, "keep=0.0"),
        ("micro", 48, "micro"),
    ):
        with pytest.raises(BadConfig, match=words):
            dataclasses.replace(SETTINGS, **{field: value})


def test_too_few_answers_are_told(tmp_path: Path) -> None:
    text = greedy([1, 2, 3, 4])
    answers.save_texts(tmp_path / "0.safetensors", [text])
    shape = target_shape(target())
    made = states.write_states(
        target(), [tmp_path / "0.safetensors"], tmp_path / "s", taps_of("eagle", shape), {}
    )
    with pytest.raises(BadConfig, match="too few answers"):
        Corpus([tmp_path / "0.safetensors"], made, 32)


class Elsewhere(Perfect):
    """The target as its own head, but for every other place, where it gives the next one's."""

    def unroll_depths(self, texts: Texts, depths: int) -> Iterator[Drafted]:
        for drafted in super().unroll_depths(texts, depths):
            states = drafted.states.clone()
            states[:, ::2] = states[:, 1::2]
            yield Drafted(drafted.depth, states)


def test_beside_a_reference_the_tokens_it_did_not_learn_are_left_out(files: Any) -> None:
    corpus = Corpus(*files, window=32)
    head = Perfect(late=1)
    teacher = teacher_of(head)
    batch, marks = teacher.texts(corpus.train[:3], 0.0, 0)
    one_deep = dataclasses.replace(SETTINGS, depths=1, keep=0.4)
    count = len(answer_places(marks, 0))
    moved: list[torch.Tensor] = []

    class Told(Perfect):
        def unroll_depths(self, texts: Texts, depths: int) -> Iterator[Drafted]:
            for drafted in super().unroll_depths(texts, depths):
                drafted.states.retain_grad()
                moved.append(drafted.states)
                yield drafted

    told = Told(late=1)
    head_loss(told, batch, marks, teacher, one_deep, Elsewhere()).backward()  # type: ignore[no-untyped-call]
    gradient = moved[0].grad
    assert gradient is not None
    learnt = gradient.abs().sum(-1).nonzero().tolist()
    assert abs(len(learnt) - 0.4 * count) <= 1
    # Elsewhere is right at odd places, which are fewer than the rest or more, by one a text.
    assert sum(place % 2 for _, place in learnt) > 0.8 * len(learnt)
    whole = dataclasses.replace(one_deep, keep=1.0)
    every = head_loss(head, batch, marks, teacher, whole, Elsewhere())
    assert torch.allclose(every, head_loss(head, batch, marks, teacher, one_deep))


def test_a_head_is_no_reference_for_itself(files: Any, tmp_path: Path) -> None:
    run(files, tmp_path / "first", SETTINGS)
    first = tmp_path / "first" / "head"
    with pytest.raises(BadConfig, match="is the head that training begins with"):
        run(files, tmp_path / "second", SETTINGS, init=first, reference=first)
    report = run(files, tmp_path / "third", SETTINGS, reference=first)
    assert report["tokens_seen"] == SETTINGS.tokens
    other = dataclasses.replace(SETTINGS, common=30)
    run(files, tmp_path / "few", other)
    with pytest.raises(BadConfig, match="draft other tokens"):
        run(files, tmp_path / "fourth", SETTINGS, init=tmp_path / "few" / "head", reference=first)


def test_a_head_of_another_build_is_not_trained_on(tmp_path: Path) -> None:
    shape = target_shape(target())
    save_head(build_head("medusa", shape), None, tmp_path / "ours", target(), {})
    assert read_head(tmp_path / "ours", target(), "medusa")[1].tolist() == list(range(97))
    save_head(
        build_head("medusa", shape, {"own_matrix": 97}), None, tmp_path / "theirs", target(), {}
    )
    with pytest.raises(BadConfig, match="theirs: has own_matrix of its own"):
        read_head(tmp_path / "theirs", target(), "medusa")


# Families whose last layer is built otherwise than llama's, wholly or in part.
OTHERWISE = (
    "phi3",
    "olmo2",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "gpt_neox",
    "starcoder2",
    "cohere2",
    "glm4",
    "deepseek_v3",
)


@cache
def family(name: str) -> Decoder:
    model = Decoder(tiny(name), name)
    model.tokenizer = None
    return model


@pytest.mark.parametrize("name", OTHERWISE)
def test_every_kind_begins_and_learns_on_every_family(name: str) -> None:
    model = family(name)
    draw = torch.Generator().manual_seed(0)
    taps = range(len(model.layout) + 1)
    tokens = torch.randint(90, (12,), generator=draw).numpy().astype(np.int32)
    text = answers.Text(tokens, PROMPT, tokens[PROMPT:, None], np.zeros((8, 1), np.float16))
    (read,) = states.text_states(model, [text], list(taps))
    known = Known(text.tokens, PROMPT, text.top_tokens[:, 0], read)
    for kind, made in head_kinds().items():
        if made.bound:
            continue
        config = dataclasses.replace(SETTINGS, kind=kind, depths=0)
        if issubclass(made, Anchored):
            anchored.begin_anchored(model, config)
            continue
        head = begin_head(model, config).head
        teacher = Teacher(model, list(taps), head, torch.arange(60))
        batch, marks = teacher.texts([known], 0.0, 0)
        loss = head_loss(head, batch, marks, teacher, config)
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.isfinite()


def test_states_go_through_the_last_norm_in_32_bits_whatever_it_is() -> None:
    for name in ("starcoder2", "llama", "gemma2"):
        narrow = Decoder(tiny(name, dtype=torch.bfloat16), name)
        states = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
        found = Output(narrow, None).norm_states(states)
        wide = copy.deepcopy(narrow.loop.norm).float()
        assert found.dtype == torch.float32 and torch.equal(found, wide(states))
        assert Output(narrow, None).norm_states(states.bfloat16()).dtype == torch.bfloat16


def test_a_head_begins_with_what_its_target_has_of_its_build() -> None:
    joined = build_head("eagle3", target_shape(family("phi3")))
    joined.take_weights(family("phi3"))
    last = family("phi3").loop.layers[-1]
    q, k, v = (getattr(joined.layer.self_attn, f"{name}_proj").weight for name in "qkv")
    whole = torch.cat([part[:, 32:] for part in (q, k, v)])
    assert torch.equal(whole, last.self_attn.qkv_proj.weight)
    mlp = joined.layer.mlp
    both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    assert torch.equal(both, last.mlp.gate_up_proj.weight)
    # Experts are no feed-forward block: that begins at random, attention as the target's.
    sparse = build_head("clover", target_shape(family("mixtral")))
    before = sparse.augment[0].mlp.up_proj.weight.clone()
    sparse.take_weights(family("mixtral"))
    assert torch.equal(sparse.augment[0].mlp.up_proj.weight, before)
    attention = family("mixtral").loop.layers[-1].self_attn
    assert torch.equal(sparse.augment[0].self_attn.o_proj.weight, attention.o_proj.weight)


def test_a_norm_that_is_kept_less_one_begins_as_what_it_multiplies_with() -> None:
    head = build_head("eagle3", target_shape(family("gemma2")))
    head.take_weights(family("gemma2"))
    kept = family("gemma2").loop.norm.weight
    assert torch.allclose(head.norm.weight, 1 + kept, atol=1e-5)
    # With a bias it is the factor alone.
    other = build_head("clover", target_shape(family("starcoder2")))
    other.take_weights(family("starcoder2"))
    assert torch.allclose(other.norm.weight, family("starcoder2").loop.norm.weight, atol=1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        "hydra:prefix=yes,blocks=4,prefix_norm=yes,heads=2",
        "medusa:blocks=2,layers=2",
        "chimera:heads=2,words=2,attention=no",
        "falcon:block=3",
        "fspad:times=1,adapter=no",
        "kangaroo:layers=1",
        "dflash:block=4,layers=1,head_norms=yes",
    ],
)
def test_a_kind_with_fields_is_trained_and_read(kind: str, files: Any, tmp_path: Path) -> None:
    config = dataclasses.replace(SETTINGS, kind=kind, depths=0)
    every = list(range(target_shape(target()).layers + 1))
    told = fingerprint(target())
    beside = states.write_states(target(), files[0], tmp_path / "states", every, told)
    lm = SimpleNamespace(models={"target": target()})
    train_head(lm, files[0], beside, every, tmp_path, config, quiet=True)  # type: ignore[arg-type]
    name = kind.partition(":")[0]
    made, _ = load_head(tmp_path / "head", target(), name)
    assert made.config.options == config.options and len(made.config.options) >= 1
    begun = begin_head(target(), config, init=tmp_path / "head").head
    assert all(
        torch.equal(a, b) for a, b in zip(begun.parameters(), made.parameters(), strict=True)
    )
    with pytest.raises(BadConfig, match="give --kind the same"):
        begin_head(target(), dataclasses.replace(config, kind=name), init=tmp_path / "head")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("medusa:own_matrix=97", "own_matrix is of published heads and not trained"),
        ("hydra:own_matrix=97", "own_matrix is of published heads and not trained"),
        ("eagle3:taps=1", "taps is of published heads and not trained; has none"),
        ("mlp-speculator:tied=no", "not trained"),
        ("hydra:wings=2", "wings is not trained; its fields are heads, blocks, prefix"),
        ("hydra:prefix=2", "must be yes or no"),
        ("hydra:blocks=many", "must be a whole number"),
    ],
)
def test_a_field_that_training_does_not_make_is_refused_by_name(kind: str, words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        TrainHead(kind=kind)
