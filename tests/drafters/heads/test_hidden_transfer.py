"""Hidden Transfer on a toy; what it shares with PPD is in test_ppd.py, its numbers on a transformer
in tests/drafters/heads/networks/test_anchored.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from foretell.core.request import Request
from foretell.core.types import Ask, Sampling
from foretell.drafters.heads.hidden_transfer import HiddenTransfer
from foretell.engine.engine import Engine
from foretell.speculation.strategy import Speculative
from foretell.testing.toy_layers import ToyLayers

SPECS = ["hidden-transfer:limit=8"]


def test_no_layer_runs_twice_over_a_node_and_rows_enter_in_the_middle() -> None:
    asked: list[Any] = []

    class Spy(HiddenTransfer):
        def target_rows(self, *args: Any) -> Any:
            steps = super().target_rows(*args)
            answer = None
            while True:
                try:
                    message = steps.send(answer)
                except StopIteration as done:
                    return done.value
                asked.append(message)
                answer = yield message

    engine = Engine({"target": ToyLayers(12, seed=2)})
    strategy = Speculative(Spy(), nodes=7)
    live = engine.add(Request([1, 2, 3], strategy, Sampling(max_new_tokens=12, temperature=0.0)))
    for _ in engine.run():
        pass
    assert live.error is None, live.error
    pairs = [(one, two) for one, two in pairwise(asked) if one.layers == (0, 1)]
    assert len(pairs) > 4
    for lower, upper in pairs:
        assert isinstance(upper, Ask) and upper.layers == (2, 3)
        nodes = len(lower.tree)
        assert upper.tree.tokens[:nodes] == lower.tree.tokens and len(upper.tree) > nodes
        assert set(upper.tree.tokens[nodes:]) == {-1}
