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
from foretell.engine.cost_profile import numbers
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


def _silent(what: str, done: int, total: int) -> None:
    pass


def tune(
    lm: LM,
    sets: Sets,
    methods: Sequence[str] = (),
    *,
    model: str = "",
    tell: Tell = _silent,
) -> dict[str, Any]:
    """Measures costs, memory and methods on `lm`, writes the profile and returns it.

    `auto` follows it at once. `methods`: other ones than `candidates`; `sets`: prompts by kind of
    text, of which the first few are taken;
    `model`: the name to report. Raises BadConfig or UnknownMethod for a wrong method, BadFile where
    the profile cannot be written, and what a method's run raises if all of them fail.
    """
    began = time.perf_counter()
    methods = methods or candidates(lm)
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
    means = _means(table)
    if "plain" not in means:
        why = "; ".join(report.failures(document)) or "their answers are too short"
        name = measurement.name
        raise BadConfig(f"{name}: cannot be measured on these prompts ({why}); give others")

    able = [spec for spec in specs if profiles.objection(spec) is None]
    count = sum(map(len, sets.values()))
    challenger = ahead(means, able, default) if count >= ENOUGH else None
    winner = None
    final = None
    if challenger is not None:
        _, second_table = measurement.compare([default, challenger], SECOND_SECONDS)
        second_means = _means(second_table)
        final = {"challenger": challenger, "means": second_means}
        winner = ahead(second_means, [challenger], default)

    about = profiles.conditions(lm.models)
    path = profiles.path_of(lm.models, lm.path, about)
    profile: dict[str, Any] = {
        "schema": profiles.SCHEMA,
        "about": about,
        "model": measurement.name,
        "few": count if count < ENOUGH else 0,  # prompts, too few to choose by
        "default": default,
        "chosen": winner or default,
        "means": means,
        "final": final,
        "best": _best_by_kind(table),
        "shown_only": [spec for spec in specs if spec not in able],
        "file": str(path),
        "seconds": time.perf_counter() - began,
        "bench": document,
    }
    write_text(path, json.dumps(profile, indent=1) + "\n", FOLDER_CURE)
    lm.forget_profile()
    return profile


def candidates(lm: LM) -> tuple[str, ...]:
    """The methods that are worth measuring on this model."""
    target = lm.models["target"]
    found = CANDIDATES + (SELF if "parts" in target.caps else ())
    if shipped_head(target, HEAD.partition(":")[0]) is not None:
        found += (HEAD, f"suffix+{HEAD}")
    return found


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
        ids = bench.prompt_ids(self.lm, prompt)
        plain = bench.Method(self.lm, "plain")
        plain.run([ids], PACE_TOKENS, 0.0, 0)  # warms up
        (run,) = plain.run([ids], PACE_TOKENS, 0.0, 0)
        return run.times[-1] / len(run.tokens)

    def compare(self, specs: Sequence[str], limit: float) -> tuple[dict[str, Any], report.Table]:
        """The document and the table of a bench that takes about `limit` seconds."""
        contenders = len(specs) + 1
        tokens, count, rounds = plan(self.token_seconds, contenders, len(self.sets), limit)
        settings = bench.Settings(
            models=(self.name,),
            dtypes=(numbers(self.lm.models["target"]),),
            methods=tuple(specs),
            max_new_tokens=tokens,
            rounds=rounds,
        )
        prompts = {kind: list(rows[:count]) for kind, rows in self.sets.items()}
        document = bench.begin(settings, prompts)
        bench.bench(settings, prompts, lambda model, dtype: self.lm, document, self.tell)
        (table,) = report.tables(document)
        return document, table


def plan(token_seconds: float, contenders: int, kinds: int, limit: float) -> tuple[int, int, int]:
    """The first of PLANS that fits into `limit` seconds, else the last.

    `token_seconds`: of a plain token.
    """
    # A method takes less time than plain decoding: about half of it, with the prompt's forward.
    shares = 1 + 0.5 * (contenders - 1)
    for tokens, prompts, rounds in PLANS:
        if token_seconds * tokens * shares * prompts * kinds * (rounds + 1) <= limit:
            return tokens, prompts, rounds
    return PLANS[-1]


def ahead(means: Mapping[str, float], able: Sequence[str], default: str) -> str | None:
    """The best of `able` by their means, if it is ahead of the default."""
    best = default
    for spec in able:
        if means.get(spec, 0.0) > means.get(best, 0.0):
            best = spec
    return best if means.get(best, 0.0) > AHEAD * means.get(default, 0.0) else None


def _means(table: report.Table) -> dict[str, float]:
    """The mean ratio of each method that ran on every kind of text."""
    means = {spec: table.mean(spec) for spec in table.rows}
    return {spec: mean for spec, mean in means.items() if mean is not None}


def _best_by_kind(table: report.Table) -> dict[str, str]:
    """The quickest method on each kind of text."""
    best: dict[str, str] = {}
    for kind in table.sets:
        ratios: dict[str, float] = {}
        for spec, cells in table.rows.items():
            if ratio := cells[kind].get("ratio"):
                ratios[spec] = ratio["median"]
        best[kind] = max(ratios, key=ratios.__getitem__)
    return best
