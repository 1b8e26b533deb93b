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
from foretell.spec import resolve_method
from foretell.speculation.strategy import Speculative

BOUND = "optimum"  # what stands beside the rules
DRAWS_BRANCH = 1  # whose draws are the lab's own: branch 0 draws the chains and the text
Tell = Callable[[str, int, int], None]  # what is measured, places done, places in all


@dataclass
class Place:
    """A measured place: both distributions, and the draws of its own."""

    p: torch.Tensor
    q: torch.Tensor
    max_count: int  # tokens drafted
    door: Door
    number: int  # of the place: a part of the keys of its draws
    draws: int

    @property
    def distributions(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.p, self.q, self.max_count

    @property
    def draw_arguments(self) -> tuple[torch.Tensor, torch.Tensor, int, Door, int, int]:
        return (*self.distributions, self.door, self.number, self.draws)


def exact_chances(bounds: list[float]) -> list[Chance]:
    return [Chance(bound) for bound in bounds]


# (how tokens are drafted, the rule that verifies them) -> the acceptance for k = 1, 2, ...
PAIRS: dict[tuple[str, str], Callable[[Place], list[Chance]]] = {
    ("independent", BOUND): lambda place: exact_chances(
        optimum.independent_optimum(*place.distributions)
    ),
    ("independent", "kseq"): lambda place: acceptance.kseq_independent(*place.distributions),
    ("independent", "sequential"): lambda place: acceptance.try_independent(*place.distributions),
    ("independent", "walk"): lambda place: acceptance.walk_independent(*place.distributions),
    ("unreplaced", BOUND): lambda place: exact_chances(
        optimum.unreplaced_optimum(*place.distributions)
    ),
    ("unreplaced", "sequential"): lambda place: acceptance.try_unreplaced(*place.draw_arguments),
    ("unreplaced", "walk"): lambda place: acceptance.walk_unreplaced(*place.draw_arguments),
    ("one drawn", BOUND): lambda place: exact_chances(
        optimum.one_drawn_optimum(*place.distributions)
    ),
    ("one drawn", "sequential"): lambda place: acceptance.try_one_drawn(*place.distributions),
    ("one drawn", "walk"): lambda place: acceptance.walk_one_drawn(*place.distributions),
    ("best", BOUND): lambda place: acceptance.accept_best(*place.distributions),
    ("best", "coin"): lambda place: acceptance.accept_best(*place.distributions),
    ("best", "sequential"): lambda place: acceptance.accept_best(*place.distributions),
    ("best", "walk"): lambda place: acceptance.accept_best(*place.distributions),
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
        position_number = report.places
        report.places += 1
        measured_place = Place(
            position.p, position.q, settings.k, self.door, position_number, settings.draws
        )
        for (drafts, rule), measure in PAIRS.items():
            for k, chance in enumerate(measure(measured_place), 1):
                key = Key(self.temperature, self.set, drafts, rule, k)
                report.note_value(key, chance.value, chance.variance)
        for rule, accepted in (("block", position.block), ("sequential", position.token_wise)):
            # A chain that ends the text goes on no further.
            full_counts = accepted + accepted[-1:] * (settings.length - len(accepted))
            for length, tokens in enumerate(full_counts, 1):
                report.note_value(Key(self.temperature, self.set, CHAIN, rule, length), tokens)


def lab(
    lm: LM,
    settings: Settings,
    sets: Mapping[str, Sequence[Prompt]],
    tell: Tell = lambda what, done, total: None,
) -> Report:
    """Measures at places of the target's texts after these prompts.

    Calls `tell` before each place. Raises Unsupported without a draft model, PromptTooLong, and
    BadConfig where the draft model has a distribution at no place.
    """
    target = lm.models["target"].name
    if "draft" not in lm.models:
        cure = "name a smaller model with the same tokenizer"
        raise Unsupported.missing_capability("the lab", target, "a draft model beside it", cure)
    chain_strategy = resolve_method(f"draft:length={settings.length}")[1]
    assert isinstance(chain_strategy, Speculative)
    report = Report(settings, target, lm.models["draft"].name)
    door = Rng(settings.seed, DRAWS_BRANCH)
    prompt_settings = [
        (temperature, name, prompt)
        for temperature in settings.temperatures
        for name, prompts in sets.items()
        for prompt in prompts[: settings.limit]
    ]
    position_count = len(prompt_settings) * settings.positions
    for text_number, (temperature, name, prompt) in enumerate(prompt_settings):
        done_count = text_number * settings.positions
        collector = Collector(report, temperature, name, door, tell, done_count, position_count)
        strategy = Observed(chain_strategy.drafter, settings.length, settings.positions, collector)
        sampling = Sampling(
            # Room for a whole chain after the last place.
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
