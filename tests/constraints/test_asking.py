"""A method that is accompanied by its constraint's questions is the same method."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from foretell.constraints.asking import Asking, ask_ahead, inner_method
from foretell.constraints.completing import Completing
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.engine.memory_budget import demand_of
from foretell.speculation.strategy import Strategy
from foretell.strategies.samples.best_of import BestOf
from foretell.testing.toy import Toy
from tests import laws
from tests.constraints.test_completing import JOINED, Asked, constraint, may_follow

BEFORE = b"x = a\nx."
# Small enough to try every outcome: a member, a name, a break; a dot with a name after it.
FEW: list[bytes | None] = [b"a", b"b", b".", b"(", b".a"]
SPECS = ["plain", "suffix:nodes=4", "token-recycling:nodes=4", "draft:length=2,nodes=3"]


class Threads(Asked):
    """Notes who asks."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def complete_names(self, uri: str, text: str, behind: str = "") -> tuple[set[str], str]:
        self.threads.add(threading.current_thread().name)
        return super().complete_names(uri, text, behind)


class Looking:
    """The same constraint as a logits processor that looks at every token."""

    def __init__(self, pieces: list[bytes | None], prompt: int):
        self.pieces, self.prompt = pieces, prompt

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = ids[0, self.prompt :].tolist()
        text = BEFORE + b"".join(self.pieces[token] or b"" for token in output)
        allowed = [may_follow(self.pieces, text, token) for token in range(len(self.pieces))]
        return scores.masked_fill(~torch.tensor(allowed), -torch.inf)


def made(pieces: list[bytes | None]) -> tuple[Completing, Threads]:
    found, _ = constraint(pieces, BEFORE)
    server: Any = Threads()
    found.documents.server = server
    return found, server


@pytest.mark.parametrize("spec", SPECS)
def test_the_law_is_that_of_looking_at_every_token(spec: str) -> None:
    strategy = laws.build(spec)
    models = laws.world(strategy, len(FEW))
    toy = models["target"]
    assert isinstance(toy, Toy)
    shown = Sampling(
        temperature=1.0, max_new_tokens=2, logits_processors=(Looking(FEW, len(laws.PROMPT)),)
    )
    wanted = laws.reference(toy, laws.PROMPT, laws.Setting(shown))
    found, _ = made(FEW)
    setting = laws.Setting(Sampling(temperature=1.0, max_new_tokens=2, constraint=found))
    led = ask_ahead(strategy, setting.sampling)
    assert isinstance(led, Asking)
    law = laws.enumerate_law(led, laws.PROMPT, setting, models, warm=False)
    assert law.distance(wanted) < 1e-9
    free = laws.Setting(Sampling(temperature=1.0, max_new_tokens=2))
    assert law.distance(laws.reference(toy, laws.PROMPT, free)) > 0.01, "it forbids nothing"


def tokens(method: Strategy, greedy: bool, wrap: bool = True) -> tuple[list[int], Threads, Any]:
    found, server = made(JOINED)
    dots = {token: 5.0 for token, piece in enumerate(JOINED) if piece and b"." in piece}
    sampling = Sampling(
        temperature=0.0 if greedy else 1.0, max_new_tokens=40, constraint=found, logit_bias=dots
    )
    models = laws.world(method, len(JOINED), copy=2.0)
    engine = Engine(models)
    led: Any = ask_ahead(method, sampling) if wrap else method
    live = engine.add(Request([0, 1, 2, 0, 1], led, sampling, text=str))
    laws.finish(engine, live)
    return live.ctx.output, server, live.ctx.stats


@pytest.mark.parametrize("greedy", [True, False])
def test_drafts_change_no_token_and_the_engine_waits_for_no_answer(greedy: bool) -> None:
    plain, server, stats = tokens(laws.build("plain"), greedy)
    assert len(plain) == 40 and stats.outside and sum(stats.outside.values()) <= len(server.asked)
    assert stats.outside["answered"] > 2 and len(set(server.asked)) == len(server.asked)
    for spec in SPECS[1:3]:
        drafted, server, stats = tokens(laws.build(spec), greedy)
        assert drafted == plain, spec
        assert stats.accepted
        assert all(name.startswith("foretell-call") for name in server.threads), spec


def test_without_it_the_tokens_are_the_same_and_the_engine_waits() -> None:
    output, server, stats = tokens(laws.build("plain"), True, wrap=False)
    assert output == tokens(laws.build("plain"), True)[0]
    assert server.threads == {"MainThread"} and not stats.outside


def test_branches_and_generators_side_by_side_are_accompanied_too() -> None:
    """Samples of best-of are forks of one branch, run together."""
    output, server, _ = tokens(BestOf(n=3), False)
    assert output and all(name.startswith("foretell-call") for name in server.threads)


def test_it_is_its_method_for_whatever_is_kept_by_method() -> None:
    found, _ = made(FEW)
    sampling = Sampling(constraint=found, max_new_tokens=8)
    plain = laws.build("draft:length=3,nodes=4")
    led = ask_ahead(plain, sampling)
    assert (
        isinstance(led, Asking) and inner_method(led) is plain and ask_ahead(led, sampling) is led
    )
    assert ask_ahead(plain, Sampling()) is plain and inner_method(plain) is plain
    assert {plain: 1}[led] == 1 and led == Asking(plain) and led != Asking(laws.build("plain"))
    assert led.models == ("draft",) and led.needs == plain.needs and led.one_text
    target = Toy(len(FEW))
    requests = [Request([0], one, sampling) for one in (plain, led)]
    assert demand_of(requests[0], target) == demand_of(requests[1], target)


def test_what_a_question_raises_is_the_requests_error() -> None:
    found, server = made(FEW)

    def broken(uri: str, text: str, behind: str = "") -> tuple[set[str], str]:
        raise OSError("no")

    server.complete_names = broken  # type: ignore[method-assign]
    sampling = Sampling(constraint=found, max_new_tokens=8)
    engine = Engine({"target": Toy(len(FEW))})
    live = engine.add(Request([0], ask_ahead(laws.build("plain"), sampling), sampling))
    other = engine.add(Request([0], laws.build("plain"), Sampling(max_new_tokens=8)))
    for _ in engine.run():
        pass
    assert isinstance(getattr(live.error, "__cause__", None), OSError)
    assert other.error is None and len(other.ctx.output) == 8


def test_closing_it_leaves_nothing_behind() -> None:
    for count in (1, 2, 3, 5, 8):
        found, _ = made(JOINED)
        sampling = Sampling(constraint=found, max_new_tokens=30)
        method = laws.build("draft:length=2,nodes=3")
        engine = Engine(laws.world(method, len(JOINED)))
        live = engine.add(Request([0, 1], ask_ahead(method, sampling), sampling))
        for _ in range(count):
            engine.step()
        engine.end(live)
        assert not live.caches and not engine.live and live.root.ended
