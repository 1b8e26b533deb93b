"""The simplest law, proved without any help: n-gram lookup leaves a model's distribution as it is.

The engine runs once for every way in which its draws can turn out. What comes out how often is
compared with the chain rule over the model's own logits.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.drafters.lookup.ngram import Ngram
from foretell.engine.engine import Engine
from foretell.speculation.strategy import Speculative
from foretell.testing.outcomes import Enumerator
from foretell.testing.toy import Toy
from tests.laws.expected import row, softmax

PROMPT = [0, 1, 0]
TEMPERATURE = 1.0


def prove_ngram_is_exact() -> None:
    """Raises AssertionError where a text of two tokens has another probability than it should."""
    toy, probabilities = Toy(3), Counter[tuple[int, ...]]()

    def answer(door: Enumerator) -> tuple[int, ...]:
        engine = Engine({"target": toy})
        sampling = Sampling(temperature=TEMPERATURE, max_new_tokens=2)
        live = engine.add(Request(PROMPT, Speculative(Ngram(n=1)), sampling, rng=door))
        list(engine.run())
        return tuple(live.ctx.output)

    for probability, output in Enumerator.walk_outcomes(answer):
        probabilities[output] += probability
    for first, second in product(range(3), repeat=2):
        after_prompt, after_first = row(toy, PROMPT), row(toy, [*PROMPT, first])
        expected = softmax(after_prompt)[first] * softmax(after_first)[second]
        assert abs(probabilities[first, second] - expected) < 1e-9, (first, second)
