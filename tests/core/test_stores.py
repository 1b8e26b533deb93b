"""What tenants share, and the models that their methods bring, are bounded."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from foretell.core.request import Request
from foretell.core.stores import TENANTS, Stores
from foretell.core.types import Sampling, Steps
from foretell.engine.engine import BROUGHT, Engine
from foretell.speculation.strategy import Strategy
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy


def add(stores: Stores, tenant: str, config: int, size: int = 0) -> None:
    stores.touch((tenant, config))
    stores[tenant, config, "store"] = SimpleNamespace(nbytes=size)


def held(stores: Stores, tenant: str) -> list[int]:
    assert {key[:2] for key in stores} == set(stores.used)
    return sorted(key[1] for key in stores if key[0] == tenant)


def test_tenants_unused_for_longest_are_forgotten_with_all_they_have() -> None:
    stores = Stores()
    for number in range(2 * TENANTS):
        add(stores, f"t{number}", 0)
        add(stores, f"t{number}", 1)
        stores.touch(("t0", 1))
        stores.trim({"t1"}, set())
    assert held(stores, "t0") == [0, 1] == held(stores, "t1") and held(stores, "t2") == []
    assert len({key[0] for key in stores}) == TENANTS + 1


@dataclass(frozen=True)
class Bringing(Strategy):
    """Brings a model of its own, of as many kinds as one likes."""

    number: int

    def bring(self, models):  # type: ignore[no-untyped-def]
        return {f"own{self.number}": Toy(8)}

    def run(self, ctx) -> Steps:  # type: ignore[no-untyped-def]
        ctx.engine.costs_of(ctx.models[f"own{self.number}"])
        yield from Plain().run(ctx)


def test_models_that_methods_bring_are_kept_of_a_bounded_number_of_them() -> None:
    engine = Engine({"target": Toy(8)})
    staying = engine.add(Request([1], Bringing(-1), Sampling(max_new_tokens=900)))
    engine.step()
    for number in range(3 * BROUGHT):
        for config in (number, -2):
            live = engine.add(Request([1], Bringing(config), Sampling(max_new_tokens=1)))
            while live.reason is None:
                engine.step()
    numbers = [part.number for part in engine.brought]
    assert len(numbers) <= BROUGHT + 1 and {-1, -2, 3 * BROUGHT - 1} <= set(numbers)
    known = [model for brought in engine.brought.values() for model in brought.values()]
    assert all(key[0] in known or key[0] is engine.models["target"] for key in engine.costs)
    engine.end(staying)
