"""Goes through the places of the target's texts and measures every drafting with every rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from foretell.api.lm import LM
from foretell.bench import prompt_ids
from foretell.bench.prompts import Prompt
from foretell.core.random import Door, Rng
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.lab import acceptance, optimum
from foretell.lab.acceptance import Chance
from foretell.lab.positions import Observed, Position
from foretell.lab.report import CHAIN, Key, Report
from foretell.lab.settings import Settings
from foretell.spec import resolve
from foretell.speculation.strategy import Speculative

BOUND = "optimum"  # what stands beside the rules
DRAWS_BRANCH = 1  # whose draws are the lab's own: branch 0 draws the chains and the text
Tell = Callable[[str, int, int], None]  # what is measured, places done, places in all


@dataclass
class Place:
    """What every pair is measured by."""

    p: torch.Tensor
    q: torch.Tensor
    most: int  # tokens drafted
    door: Door
    number: int  # of the place: a part of the keys of its draws
    draws: int

    @property
    def laws(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.p, self.q, self.most

    @property
    def drawn(self) -> tuple[torch.Tensor, torch.Tensor, int, Door, int, int]:
        return (*self.laws, self.door, self.number, self.draws)


def exact(bounds: list[float]) -> list[Chance]:
    return [Chance(bound) for bound in bounds]


# (how tokens are drafted, the rule that verifies them) -> the acceptance for k = 1, 2, ...
PAIRS: dict[tuple[str, str], Callable[[Place], list[Chance]]] = {
    ("independent", BOUND): lambda place: exact(optimum.independent(*place.laws)),
    ("independent", "kseq"): lambda place: acceptance.independent_kseq(*place.laws),
    ("independent", "sequential"): lambda place: acceptance.independent_sequential(*place.laws),
    ("independent", "walk"): lambda place: acceptance.independent_walk(*place.laws),
    ("unreplaced", BOUND): lambda place: exact(optimum.unreplaced(*place.laws)),
    ("unreplaced", "sequential"): lambda place: acceptance.unreplaced_sequential(*place.drawn),
    ("unreplaced", "walk"): lambda place: acceptance.unreplaced_walk(*place.drawn),
    ("one drawn", BOUND): lambda place: exact(optimum.one_drawn_optimum(*place.laws)),
    ("one drawn", "sequential"): lambda place: acceptance.one_drawn_sequential(*place.laws),
    ("one drawn", "walk"): lambda place: acceptance.one_drawn_walk(*place.laws),
    ("best", BOUND): lambda place: acceptance.chosen_any(*place.laws),
    ("best", "coin"): lambda place: acceptance.chosen_any(*place.laws),
    ("best", "sequential"): lambda place: acceptance.chosen_any(*place.laws),
    ("best", "walk"): lambda place: acceptance.chosen_any(*place.laws),
}


@dataclass
class Collector:
    """Measures the places of one text into a report."""

    report: Report
    temperature: float
    set: str
    door: Door
    tell: Tell
    done: int  # places before this one, those that other texts ended without included
    total: int

    def __call__(self, position: Position | None) -> None:
        self.tell(f"{self.set}, temperature {self.temperature:g}", self.done, self.total)
        self.done += 1
        report, settings = self.report, self.report.settings
        if position is None:
            report.skipped += 1
            return
        number = report.places
        report.places += 1
        place = Place(position.p, position.q, settings.k, self.door, number, settings.draws)
        for (drafts, rule), measure in PAIRS.items():
            for k, chance in enumerate(measure(place), 1):
                key = Key(self.temperature, self.set, drafts, rule, k)
                report.note(key, chance.value, chance.variance)
        for rule, accepted in (("block", position.block), ("sequential", position.token_wise)):
            # A chain that ends the text goes on no further.
            whole = accepted + accepted[-1:] * (settings.length - len(accepted))
            for length, tokens in enumerate(whole, 1):
                report.note(Key(self.temperature, self.set, CHAIN, rule, length), tokens)


def lab(
    lm: LM,
    settings: Settings,
    sets: Mapping[str, Sequence[Prompt]],
    tell: Tell = lambda what, done, total: None,
) -> Report:
    """Measures at places of the target's texts behind these prompts.

    Calls `tell` before each place. Raises Unsupported without a draft model, PromptTooLong, and
    BadConfig where the draft model has a law at no place.
    """
    target = lm.models["target"].name
    if "draft" not in lm.models:
        cure = "name a smaller model with the same tokenizer"
        raise Unsupported.missing("the lab", target, "a draft model beside it", cure)
    chain = resolve(f"draft:length={settings.length}")[1]
    assert isinstance(chain, Speculative)
    report = Report(settings, target, lm.models["draft"].name)
    door = Rng(settings.seed, DRAWS_BRANCH)
    texts = [
        (temperature, name, prompt)
        for temperature in settings.temperatures
        for name, prompts in sets.items()
        for prompt in prompts[: settings.limit]
    ]
    total = len(texts) * settings.positions
    for number, (temperature, name, prompt) in enumerate(texts):
        done = number * settings.positions
        collector = Collector(report, temperature, name, door, tell, done, total)
        strategy = Observed(chain.drafter, settings.length, settings.positions, collector)
        sampling = Sampling(
            # Room for a whole chain behind the last place.
            max_new_tokens=settings.positions + settings.length + 1,
            temperature=temperature,
            seed=settings.seed,
        )
        request = Request(prompt_ids(lm, prompt), strategy, sampling, "lab")
        with lm.driver.exclusive():
            run_alone(Engine(lm.models, lm.engine.eos), request)
    if not report.places:
        raise BadConfig(
            f"{report.draft} has no law at any of {report.skipped} places: the texts are beyond "
            "its context or its vocabulary; give shorter prompts or another draft model"
        )
    return report


def run_alone(engine: Engine, request: Request) -> None:
    """Runs a request to its end. Raises what went wrong."""
    live = engine.add(request)
    for _ in engine.run():
        pass
    if live.error is not None:
        raise live.error
