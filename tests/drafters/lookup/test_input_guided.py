"""Copying from a given source: where the pointer goes and what is drafted; its exactness is in
test_laws.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell import cli
from foretell.cache.job import Job
from foretell.core.context import Context
from foretell.core.drafter import Feedback
from foretell.core.request import Request
from foretell.core.types import Outcome, Reply, Sampling
from foretell.drafters.lookup.input_guided import AHEAD, InputGuided
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import BadConfig
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from tests import laws, tiny
from tests.texts import set_limit, set_text

SPECS = ["input-guided:source=1 2 0 1 0 2 1 1 2,k=4", "input-guided:nearest=no"]


def context(drafter: InputGuided, prompt: list[int], new: int = 40, vocab: int = 8) -> Context:
    return Context(
        Engine({"target": Toy(vocab)}),
        Request(prompt, Speculative(drafter), Sampling(max_new_tokens=new)),
    )


def places(source: list[int], tail: list[int]) -> list[int]:
    """Positions after every occurrence of `tail` that has something after it."""
    return [end for end in range(len(tail), len(source)) if source[end - len(tail) : end] == tail]


def only(source: list[int], text: list[int], n: int) -> int:
    """The paper's rule, in loops: n-grams from short to long until one stands nowhere or once."""
    for size in range(1, min(n, len(text)) + 1):
        found = places(source, text[-size:])
        if not found:
            return -1
        if len(found) == 1:
            return found[0]
    return -1


def nearest(source: list[int], text: list[int], n: int, last: int) -> int:
    """The longest n-gram nearest to last + 1; a single token only close after it; else that very
    place.
    """
    for size in range(min(n, len(text)), 0, -1):
        found = places(source, text[-size:])
        if size == 1 and last >= 0:
            found = [place for place in found if last < place <= last + AHEAD][:1]
        if found:
            return min(found, key=lambda place: abs(place - last - 1))
    return last + 1 if 0 <= last < len(source) - 1 else -1


def twin(
    source: list[int], prompt: list[int], output: list[int], drafter: InputGuided
) -> list[int]:
    """What is drafted after `output`, worked out from the start of it."""
    at, last = (0, 0) if drafter.source else (-1, -1)
    text = prompt[:] if drafter.source else prompt[:-1]
    for token in output if drafter.source else [prompt[-1], *output]:
        text.append(token)
        if 0 <= at < len(source) and source[at] == token:
            at += 1
            continue
        last = at if at >= 0 else last
        at = (
            nearest(source, text, drafter.n, last)
            if drafter.nearest
            else only(source, text, drafter.n)
        )
    return source[at:] if at >= 0 else []


TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=20)


@given(
    TEXT,
    TEXT,
    st.lists(st.integers(0, 3), max_size=20),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_drafts_what_stands_behind_the_pointer(
    source: list[int],
    prompt: list[int],
    output: list[int],
    n: int,
    near: bool,
    given: bool,
    data: st.DataObject,
) -> None:
    drafter = InputGuided(tuple(source) if given else (), n, nearest=near)
    ctx = context(drafter, prompt)
    state = drafter.start(ctx)
    cuts = data.draw(st.sets(st.integers(0, len(output))))
    for end in sorted({*cuts, len(output)}):  # committed by one or several tokens a step
        set_text(ctx, prompt + output[:end])
        tree = drafter.propose(ctx, state, 50)
    tree.check()
    assert tree.is_chain and tree.tokens[1:] == twin(
        source if given else prompt, prompt, output, drafter
    )
    assert all(m >= 1 for m in tree.matches[1:]) and set(tree.sources[1:]) <= {"input-guided"}
    assert all(
        0 < value < above for above, value in zip(tree.values, tree.values[1:], strict=False)
    )


def test_the_first_draft_is_the_sources_beginning() -> None:
    ctx, drafter = context(InputGuided(), [7], new=6), InputGuided((1, 2, 3, 4, 5, 6))
    assert drafter.propose(ctx, drafter.start(ctx), 100).tokens == [
        7,
        1,
        2,
        3,
        4,
        5,
    ]  # the sixth is not drafted
    assert drafter.propose(ctx, drafter.start(ctx), 3).tokens == [7, 1, 2]
    assert drafter.propose(ctx, drafter.start(ctx), 1).tokens == [7]
    set_limit(ctx, 2)
    assert drafter.propose(ctx, drafter.start(ctx), 100).tokens == [7]
    short = InputGuided((1, 2, 3), k=2)
    ctx = context(short, [7])
    assert short.propose(ctx, short.start(ctx), 100).tokens == [7, 1, 2]


@pytest.mark.parametrize(
    ("near", "output", "draft"),
    [
        (False, [1, 7], []),  # a word of its own: the paper goes on without a draft
        (True, [1, 7], [3, 1, 4, 5, 6]),  # it has replaced one
        (False, [1, 3], [1, 4, 5, 6]),  # one left out; what follows stands once
        (False, [1, 7, 1], []),  # ambiguous, and two tokens stand nowhere
        (True, [1, 7, 1], [4, 5, 6]),  # the nearer of the two places
        (False, [1, 2, 3, 1, 5], [6]),
        (True, [1, 2, 3, 1, 4, 5, 6], []),  # at the end
    ],
)
def test_the_pointer_after_a_difference(near: bool, output: list[int], draft: list[int]) -> None:
    drafter = InputGuided((1, 2, 3, 1, 4, 5, 6), nearest=near)
    ctx = context(drafter, [0])
    state = drafter.start(ctx)
    set_text(ctx, [0, *output])
    assert drafter.propose(ctx, state, 50).tokens[1:] == draft


def tokens_a_step(
    drafter: InputGuided, prompt: list[int], answer: list[int], budget: int = 33
) -> float:
    """The drafter driven without a model: a given answer decides what is accepted."""
    ctx = context(drafter, prompt, len(answer), vocab=512)
    state, steps = drafter.start(ctx), 0
    while rest := answer[len(ctx.output) :]:
        tree, node, path = drafter.propose(ctx, state, budget), 0, list[int]()
        while len(path) + 1 < len(rest) and (node := tree.find_child(node, rest[len(path)])) > 0:
            path.append(node)
        kept = rest[: len(path) + 1]
        set_text(ctx, [*ctx.tokens, *kept])
        drafter.observe(
            ctx, state, Feedback(tree, Reply(torch.empty(0), {}, []), Outcome(path, kept[-1]), kept)
        )
        steps += 1
    return len(answer) / steps


def test_an_edited_text_is_copied_in_few_steps() -> None:
    draw = random.Random(5)
    source = [
        draw.choice(range(200)) if draw.random() < 0.5 else draw.choice(range(8))
        for _ in range(1500)
    ]
    edits = [draw.random() for _ in source]
    answer = [
        x
        for t, e in zip(source, edits, strict=True)
        for x in ([511] if e < 0.02 else [] if e > 0.98 else [t])
    ]
    near, paper = InputGuided(tuple(source)), InputGuided(tuple(source), nearest=False)
    assert tokens_a_step(paper, [510], source) > 30, "an unchanged text is one copy"
    ours, theirs = tokens_a_step(near, [510], answer), tokens_a_step(paper, [510], answer)
    assert theirs > 4 and ours > 1.2 * theirs
    assert tokens_a_step(InputGuided(), [*source, 510], answer) > 0.9 * ours, (
        "the prompt as the source"
    )


def test_with_a_model_that_follows_the_source() -> None:
    models = {"target": Toy(8, copy=4.0)}
    prompt = [1, 2, 3, 4, 5, 6, 7] * 3
    live = laws.generate(
        Speculative(InputGuided((1, 2, 3, 4, 5, 6, 7) * 4), nodes=8),
        prompt,
        laws.Setting(Sampling(max_new_tokens=24)),
        models,
    )
    assert live.ctx.stats.mat > 2


# --- models that read a source


START, END = 0, 1


def corrected(source: Sequence[int]) -> list[int]:
    """What a Corrector writes: some tokens replaced, left out or put in, then the end."""
    answer = []
    for place, token in enumerate(source):
        if token == END:
            break
        if place % 37 == 20:
            answer.append(token ^ 1)
        elif place % 41 != 33:
            answer += [token, 2] if place % 43 == 30 else [token]
    return [*answer, END]


class Corrector(Toy):
    """A toy whose best token is the next one of its corrected source."""

    caps = Toy.caps | {"source"}

    def check_source(self, source: object) -> None:
        """Any will do."""

    def _node_values(self, job: Job, positions: torch.Tensor) -> torch.Tensor:
        self.answer = corrected(job.cache.inputs["source"])
        return positions

    def _row_logits(self, tokens: np.ndarray, values: np.ndarray) -> np.ndarray:
        logits = super()._row_logits(tokens, values)
        place = min(int(values[:, 0].max()), len(self.answer) - 1)
        logits[self.answer[place]] += 20
        return logits


def correct(drafter: str, source: Sequence[int]) -> Live:
    """The request that corrects a source, run to its end."""
    engine = Engine({"target": Corrector(128)}, (END,))
    request = Request(
        [START],
        laws.build(drafter, nodes=32),
        Sampling(max_new_tokens=500),
        inputs={"source": tuple(source)},
    )
    live = engine.add(request)
    laws.finish(engine, live)
    return live


@pytest.mark.parametrize("spec", ["input-guided", "input-guided:nearest=no"])
def test_by_default_it_copies_what_the_model_reads(spec: str) -> None:
    draw = random.Random(3)
    source = [draw.randrange(4, 128) for _ in range(300)]
    live, plain = correct(spec, [*source, END]), correct("plain", [*source, END])
    assert live.ctx.output == plain.ctx.output == corrected(source)
    assert len(live.ctx.output) / sum(live.ctx.stats.calls.values()) >= 4
    assert len(plain.ctx.output) == sum(plain.ctx.stats.calls.values())


@pytest.mark.parametrize("ends", [(), (END,), (END, END)])
def test_an_unchanged_source_takes_one_forward(ends: tuple[int, ...]) -> None:
    """All of it is accepted, and the row after it says the end: nothing is looked up there."""
    source = [5, 6, 7, 8, 9, 10, 11]
    live = correct("input-guided", [*source, *ends])
    assert live.ctx.output == [*source, END]
    assert live.ctx.stats.calls["target"] == 1 and live.ctx.stats.drafted == len(source)
    assert correct("input-guided", [END]).ctx.output == [END]


def test_a_source_that_is_given_goes_before_the_requests() -> None:
    live = correct("input-guided:source=9 9 9", [5, 6, 7])
    assert live.ctx.output == [5, 6, 7, END] and not live.ctx.stats.accepted


@pytest.mark.parametrize("token", [-1, 8])
def test_a_source_with_tokens_the_model_lacks_is_refused(token: int) -> None:
    with pytest.raises(
        BadConfig, match=f"input-guided:source={token}: must be ids of the vocabulary, 0 to 7"
    ):
        laws.generate(
            Speculative(InputGuided((1, token))),
            [1],
            laws.Setting(Sampling(max_new_tokens=4)),
            {"target": Toy(8)},
        )


def test_a_file_is_the_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lm, prompt = tiny.lm(), "def add(a, b):"
    plain = lm.generate(prompt, "plain", max_new_tokens=30)
    (tmp_path / "answer.txt").write_bytes(lm.decode(plain.tokens).encode())
    spec = f"input-guided:source=@{tmp_path / 'answer.txt'},nodes=8"
    out = lm.generate(prompt, spec, max_new_tokens=30)
    assert out.tokens == plain.tokens and out.stats.mat > 1 and "input-guided" in out.draft
    folder = tiny.save(tiny.llama(), tmp_path / "model")
    assert (
        cli.run(
            ["generate", "--model", str(folder), "--method", spec, "--max-new-tokens", "30", prompt]
        )
        == 0
    )
    assert capsys.readouterr().out == plain.text + "\n"
    wrong = [
        "generate",
        "--model",
        str(folder),
        "--method",
        "input-guided:source=@nowhere.txt",
        prompt,
    ]
    assert cli.run(wrong) == 2
    assert (
        "input-guided:source=@nowhere.txt: cannot be read (No such file" in capsys.readouterr().err
    )
