"""drafters/heads/networks/medusa.py on a small real target: what fresh blocks say, and which token
a depth is of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.drafters.heads.medusa import Medusa as Drafter
from foretell.drafters.heads.networks.base import Drafted, Texts
from foretell.drafters.heads.networks.folder import build_head, load_head, save_head, target_shape
from foretell.drafters.heads.networks.medusa import Medusa
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, BadModel
from foretell.models.decoder.decoder import Decoder
from foretell.speculation.strategy import Speculative
from foretell.train.heads.head_data import Known, Teacher
from foretell.train.heads.head_report import RANKS, hit_shares, rank_table, true_ranks
from tests.models.decoder.families import tiny

MODEL = tiny("llama")
TARGET: Any = Decoder(tiny("llama"))
KEPT = torch.arange(TARGET.vocab)


def fresh(**options: Any) -> Any:
    return build_head("medusa", target_shape(TARGET), options)


def greedy_answer(length: int = 24) -> tuple[Known, torch.Tensor]:
    """A text that the target wrote greedily, with its own states; and its logits (n, V)."""
    tokens = torch.tensor([[3, 5, 7]])
    inside: list[torch.Tensor] = []
    hook = MODEL.model.norm.register_forward_pre_hook(lambda _, args: inside.append(args[0][0]))
    with torch.no_grad():
        for _ in range(length):
            best = MODEL(tokens).logits[0, -1].argmax()
            tokens = torch.cat([tokens, best[None, None]], 1)
        logits = MODEL(tokens).logits[0]
    hook.remove()
    ids = tokens[0].numpy()
    return Known(ids, 3, ids[3:], inside[-1].to(torch.bfloat16)), logits


class Oracle(Medusa):
    """The target itself in place of the blocks: `late` tokens late, if it is not 0."""

    late = 0

    def unroll_depths(self, texts: Texts, depths: int) -> Iterator[Drafted]:
        for depth in range(depths):
            yield Drafted(depth, texts.shift_left(texts.finals, depth + self.late))


def test_fresh_blocks_hand_the_state_through() -> None:
    head = fresh()
    features = torch.randn(2, 7, TARGET.config.hidden_size)
    texts = Texts(torch.zeros(2, 7, dtype=torch.long), features, features, features)
    drafted = list(head.unroll_depths(texts, 9))
    assert [part.depth for part in drafted] == [0, 1, 2, 3]
    assert all(torch.equal(part.states, features) for part in drafted)
    with torch.no_grad():
        head.blocks[2].linear.bias.fill_(0.5)
    assert not torch.equal(list(head.unroll_depths(texts, 4))[2].states, features)


@pytest.mark.parametrize("late", [0, 1])
def test_a_depth_is_of_its_own_token(late: int) -> None:
    """The target at the right shift is always right, and one token further it is not."""
    oracle = Oracle(fresh().config)
    oracle.late = late
    answer, _ = greedy_answer()
    teacher = Teacher(TARGET, [len(TARGET.layout)], oracle, KEPT)
    (ranks,) = true_ranks(oracle, [answer], teacher, 4, 64)
    shares = rank_table([ranks])
    firsts = [row[0] for row in shares]
    # The states are bfloat16, which may turn a close choice.
    assert min(firsts) > 0.9 if late == 0 else max(firsts) < 0.5, firsts
    assert (min(hit_shares(oracle, [answer], teacher, 4, 64)) > 0.8) == (late == 0)


def test_ranks_are_those_of_the_texts_own_tokens() -> None:
    """Fresh blocks speak of the state of token i - 1, at every depth: against a plain loop."""
    head, (answer, logits) = fresh(), greedy_answer()
    teacher = Teacher(TARGET, [len(TARGET.layout)], head, KEPT)
    (found,) = true_ranks(head, [answer], teacher, 4, 64)
    end = len(answer.tokens)
    expected = []
    for place in range(3, end - 4):
        order = logits[place - 1].argsort(descending=True).tolist()
        ranks = [order.index(answer.tokens[place + depth + 1]) for depth in range(4)]
        expected.append([min(rank, RANKS) for rank in ranks])
    assert len(found) >= len(expected) > 10
    close = np.abs(found[len(found) - len(expected) :] - np.array(expected)) <= 1
    assert close.mean() > 0.9


def test_a_text_that_is_not_greedy_is_left_out_of_the_table() -> None:
    answer, _ = greedy_answer()
    other = Known(answer.tokens, 3, answer.top_tokens + 1, answer.states)
    head = fresh()
    teacher = Teacher(TARGET, [len(TARGET.layout)], head, KEPT)
    assert rank_table(true_ranks(head, [other], teacher, 4, 64)) == []


def saved(folder: Path, **about: Any) -> Path:
    save_head(fresh(), None, folder, TARGET, about)
    return folder


def test_in_the_engine_fresh_blocks_draft_the_law_before(tmp_path: Path) -> None:
    """The state they read is that of the token before the newest, so they repeat that one's law."""
    head = str(saved(tmp_path / "head", ranks=[[0.5, 0.3, 0.1], [0.4]]))
    seen: list[Any] = []

    class Spy(Drafter):
        def steps(self, ctx: Any, reader: Any, budget: int) -> Any:
            tree = yield from super().steps(ctx, reader, budget)
            seen.append((list(ctx.tokens), tree))
            return tree

    spy = Spy(head=head)
    models = {"target": TARGET, **spy.bring({"target": TARGET})}
    engine = Engine(models)
    live = engine.add(
        Request([3, 5, 7], Speculative(spy, nodes=8), Sampling(max_new_tokens=12, temperature=0.0))
    )
    for _ in engine.run():
        pass
    assert live.error is None, live.error
    answer, _ = greedy_answer()
    assert live.ctx.tokens == answer.tokens[: len(live.ctx.tokens)].tolist()
    checked = 0
    for text, tree in seen:
        if len(tree) < 7:
            continue
        with torch.no_grad():
            logits = MODEL(torch.tensor([text])).logits[0, -2]
        first = [tree.tokens[node] for node in tree.tries[0]]
        assert first == logits.topk(3).indices.tolist()
        assert tree.tokens[tree.tries[tree.tries[0][0]][0]] == first[0]
        checked += 1
    assert checked >= 3


def test_it_is_kept_with_its_shares(tmp_path: Path) -> None:
    folder = saved(tmp_path / "head", ranks=[[0.5, 0.2], [0.1]])
    head, _ = load_head(folder, TARGET, "medusa")
    assert head.ranks == [[0.5, 0.2], [0.1]]
    config = json.loads((folder / "config.json").read_text())
    for bad in (3, [["x"]], [[1.5]], [[]], [[float("nan")]]):
        (folder / "config.json").write_text(json.dumps({**config, "ranks": bad}))
        with pytest.raises(BadModel, match="ranks must be shares"):
            load_head(folder, TARGET, "medusa")


@pytest.mark.parametrize("blocks", [0, 17, 1.5])
def test_a_number_of_blocks_out_of_range_is_refused(blocks: Any) -> None:
    with pytest.raises(BadConfig, match="medusa:blocks"):
        fresh(blocks=blocks)
