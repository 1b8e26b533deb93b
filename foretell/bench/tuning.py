"""`foretell tune`: measures a model on this machine and chooses what `auto` stands for.

The profile (foretell.api.profiles) holds the document of a short bench of a handful of methods on
every kind of text, and the choice: the method with the highest geometric mean over the kinds, if
it is ahead of the default there and again in a second measurement of these two on more prompts, so
that luck does not choose; a handful of prompts chooses nothing for all texts. Only methods whose
drafts may follow measured costs at every temperature can be chosen, since only those are never
slower than plain decoding.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretell import bench
from foretell.api import profiles
from foretell.api.lm import LM
from foretell.bench import report
from foretell.bench.prompts import Prompt
from foretell.drafters.heads.attach import shipped_head
from foretell.engine.cost_profile import number_format
from foretell.errors import BadConfig
from foretell.ops.files import write_text
from foretell.spec import AUTO, HEAD

CANDIDATES = (AUTO, "suffix+token-recycling", "suffix+approx", "suffix", "token-recycling", "ngram")
# Beside these, where the target's layers can be run one by one: it may draft for itself.
SELF = ("swift:best=yes", "layerskip:best=yes")
ENOUGH = 16  # prompts by which another method than the default may be chosen
AHEAD = 1.01  # times the default's mean that another method must reach, twice
FIRST_SECONDS = 30.0  # that measuring all methods may take, about
SECOND_SECONDS = 12.0  # and the best one beside the default
# New tokens, prompts of a kind, counted rounds; prompts differ more than rounds do.
PLANS = (
    (64, 8, 2),
    (64, 8, 1),
    (64, 6, 1),
    (64, 5, 1),
    (64, 4, 1),
    (64, 3, 1),
    (48, 2, 1),
    (32, 1, 1),
)
PACE_TOKENS = 24  # that plain decoding is timed by beforehand
FOLDER_CURE = "set FORETELL_CACHE to another folder"
Tell = Callable[[str, int, int], None]  # (what is being measured, runs done, runs in all)
Sets = Mapping[str, Sequence[Prompt]]  # prompts by kind of text


def _ignore_progress(what: str, done: int, total: int) -> None:
    pass


def tune_model(
    lm: LM,
    sets: Sets,
    methods: Sequence[str] = (),
    *,
    model: str = "",
    tell: Tell = _ignore_progress,
) -> dict[str, Any]:
    """Measures costs, memory and methods on `lm`, writes the profile and returns it.

    `auto` follows it at once. `methods`: other ones than `candidates`; `sets`: prompts by kind of
    text, of which the first few are taken;
    `model`: the name to report. Raises BadConfig or UnknownMethod for a wrong method, BadFile where
    the profile cannot be written, and what a method's run raises if all of them fail.
    """
    start_time = time.perf_counter()
    methods = methods or candidate_methods(lm)
    specs = {spec: None for spec in ("plain", *methods) if spec != "auto"}
    for spec in specs:  # so that a wrong one is told before anything takes time
        lm.resolve(spec)
    lm.measure(fresh=True)
    default = lm.default
    specs[default] = None
    measurement = _Measurement(lm, sets, model or lm.models["target"].name, tell)

    contenders = [default, *(default if spec == "auto" else spec for spec in methods)]
    document, table = measurement.compare(list(dict.fromkeys(contenders)), FIRST_SECONDS)
    for cell in document["cells"]:
        cell.pop("timeline", None)  # the larger part, and of no use here
    means = _mean_ratios(table)
    if "plain" not in means:
        failure_reason = "; ".join(report.failures(document)) or "their answers are too short"
        model_name = measurement.name
        raise BadConfig(
            f"{model_name}: cannot be measured on these prompts ({failure_reason}); give others"
        )

    eligible_specs = [spec for spec in specs if profiles.find_objection(spec) is None]
    prompt_count = sum(map(len, sets.values()))
    challenger = best_ahead(means, eligible_specs, default) if prompt_count >= ENOUGH else None
    winner = None
    final_round = None
    if challenger is not None:
        _, final_table = measurement.compare([default, challenger], SECOND_SECONDS)
        final_means = _mean_ratios(final_table)
        final_round = {"challenger": challenger, "means": final_means}
        winner = best_ahead(final_means, [challenger], default)

    conditions = profiles.current_conditions(lm.models)
    path = profiles.path_of(lm.models, lm.path, conditions)
    profile: dict[str, Any] = {
        "schema": profiles.SCHEMA,
        "about": conditions,
        "model": measurement.name,
        "few": prompt_count if prompt_count < ENOUGH else 0,  # prompts, too few to choose by
        "default": default,
        "chosen": winner or default,
        "means": means,
        "final": final_round,
        "best": _best_by_kind(table),
        "shown_only": [spec for spec in specs if spec not in eligible_specs],
        "file": str(path),
        "seconds": time.perf_counter() - start_time,
        "bench": document,
    }
    write_text(path, json.dumps(profile, indent=1) + "\n", FOLDER_CURE)
    lm.forget_profile()
    return profile


def candidate_methods(lm: LM) -> tuple[str, ...]:
    """The methods that are worth measuring on this model."""
    target = lm.models["target"]
    candidate_specs = CANDIDATES + (SELF if "parts" in target.caps else ())
    if shipped_head(target, HEAD.partition(":")[0]) is not None:
        candidate_specs += (HEAD, f"suffix+{HEAD}")
    return candidate_specs


class _Measurement:
    """Short benches of a model on a few prompts of every kind."""

    def __init__(self, lm: LM, sets: Sets, name: str, tell: Tell):
        self.lm = lm
        self.sets = sets
        self.name = name
        self.tell = tell
        self.token_seconds = self._plain_pace()

    def _plain_pace(self) -> float:
        """Seconds of a token of plain decoding."""
        prompt = next(iter(self.sets.values()))[0]
        prompt_ids = bench.prompt_ids(self.lm, prompt)
        plain = bench.Method(self.lm, "plain")
        plain.run([prompt_ids], PACE_TOKENS, 0.0, 0)  # warms up
        (run,) = plain.run([prompt_ids], PACE_TOKENS, 0.0, 0)
        return run.times[-1] / len(run.tokens)

    def compare(self, specs: Sequence[str], limit: float) -> tuple[dict[str, Any], report.Table]:
        """The document and the table of a bench that takes about `limit` seconds."""
        contender_count = len(specs) + 1
        token_count, prompt_count, round_count = choose_plan(
            self.token_seconds, contender_count, len(self.sets), limit
        )
        settings = bench.Settings(
            models=(self.name,),
            dtypes=(number_format(self.lm.models["target"]),),
            methods=tuple(specs),
            max_new_tokens=token_count,
            rounds=round_count,
        )
        prompts = {kind: list(rows[:prompt_count]) for kind, rows in self.sets.items()}
        document = bench.begin_document(settings, prompts)
        bench.run_bench(settings, prompts, lambda model, dtype: self.lm, document, self.tell)
        (table,) = report.tables(document)
        return document, table


def choose_plan(
    token_seconds: float, contenders: int, kinds: int, limit: float
) -> tuple[int, int, int]:
    """The first of PLANS that fits into `limit` seconds, else the last.

    `token_seconds`: of a plain token.
    """
    # A method takes less time than plain decoding: about half of it, with the prompt's forward.
    plain_equivalents = 1 + 0.5 * (contenders - 1)
    for new_tokens, prompt_count, round_count in PLANS:
        if (
            token_seconds
            * new_tokens
            * plain_equivalents
            * prompt_count
            * kinds
            * (round_count + 1)
            <= limit
        ):
            return new_tokens, prompt_count, round_count
    return PLANS[-1]


def best_ahead(
    means: Mapping[str, float], eligible_specs: Sequence[str], default: str
) -> str | None:
    """The best of `eligible_specs` by their means, if it is ahead of the default."""
    best_spec = default
    for spec in eligible_specs:
        if means.get(spec, 0.0) > means.get(best_spec, 0.0):
            best_spec = spec
    return best_spec if means.get(best_spec, 0.0) > AHEAD * means.get(default, 0.0) else None


def _mean_ratios(table: report.Table) -> dict[str, float]:
    """The mean ratio of each method that ran on every kind of text."""
    means = {spec: table.mean(spec) for spec in table.rows}
    return {spec: mean for spec, mean in means.items() if mean is not None}


def _best_by_kind(table: report.Table) -> dict[str, str]:
    """The quickest method on each kind of text."""
    best_specs: dict[str, str] = {}
    for kind in table.sets:
        ratios: dict[str, float] = {}
        for spec, cells in table.rows.items():
            if ratio := cells[kind].get("ratio"):
                ratios[spec] = ratio["median"]
        best_specs[kind] = max(ratios, key=ratios.__getitem__)
    return best_specs
