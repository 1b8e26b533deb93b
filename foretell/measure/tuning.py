"""What `foretell tune` finds out about a model on this machine, and keeps: its costs, and which
method is best for it.

A profile is a JSON file in the user's cache folder, one for every model (its place and its
weights), draft model, dtype, device, number of threads and version. It holds the document of a
short bench of a handful of methods on every kind of text, and the choice: the method with the
highest geometric mean over the kinds, if it is ahead of the default there and again in a second
measurement of these two on more prompts, so that luck does not choose. That is what `auto` stands
for from then on. Only methods whose drafts may follow measured costs at every temperature can be
chosen, since only those are never slower than plain decoding.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foretell.cards import guarantee
from foretell.core.model import Model
from foretell.core.strategy import Speculative, Strategy
from foretell.errors import BadConfig, ForetellError
from foretell.measure.profiling import folder, numbers, traits
from foretell.measure.prompts import Prompt
from foretell.spec import AUTO, resolve

if TYPE_CHECKING:
    from foretell.api import LM

SCHEMA = "foretell.tune/2"
CANDIDATES = (AUTO, "suffix+token-recycling", "suffix+approx", "suffix", "token-recycling", "ngram")
AHEAD = 1.01  # times the default's mean that another method must reach, twice
SECONDS = (
    30.0,
    12.0,
)  # that measuring the methods may take, about: all of them, and the best beside the default
# New tokens, prompts of a kind and counted rounds: prompts differ more than rounds do.
SIZES = (
    (64, 8, 2),
    (64, 8, 1),
    (64, 6, 1),
    (64, 5, 1),
    (64, 4, 1),
    (64, 3, 1),
    (48, 2, 1),
    (32, 1, 1),
)
Tell = Callable[[str, int, int], None]  # (what is being measured, runs done, runs in all)


def weights(model: Model | None) -> str:
    """A digest of a few numbers of every weight, the same in every dtype that rounds them alike;
    "none": no model.
    """
    if model is None:
        return "none"
    inner = getattr(model, "hf", None)
    digest = hashlib.sha256(
        f"{type(inner or model).__name__} {model.vocab} {model.layout}".encode()
    )
    if isinstance(inner, torch.nn.Module):
        parts = [
            p.detach().reshape(-1)[:: max(1, p.numel() // 8)][:8]
            for p in inner.parameters()
            if p.numel()
        ]
        if parts:
            sample = torch.cat([p.to(torch.bfloat16) for p in parts])
            digest.update(sample.cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def place(models: Mapping[str, Model]) -> dict[str, str]:
    """What a profile is valid for, by name."""
    target = models["target"]
    return {
        "weights": weights(target),
        "draft model": weights(models.get("draft")),
        **traits(target),
    }


def file(models: Mapping[str, Model], path: Path | None, about: Mapping[str, str]) -> Path:
    """Where the profile lies; those of one model have the same beginning."""
    name = str(path.resolve()) if path is not None else models["target"].name
    first, second = (
        hashlib.sha256(text.encode()).hexdigest()
        for text in (name, json.dumps(about, sort_keys=True))
    )
    return folder() / "tuned" / f"{first[:16]}-{second[:16]}.json"


def read(path: Path) -> dict[str, Any]:
    """The profile in a file. Raises OSError, or ValueError where it is damaged."""
    try:
        profile = json.loads(path.read_text("utf-8"))
        if profile["schema"] != SCHEMA or not all(
            isinstance(v, str) for v in profile["about"].values()
        ):
            raise ValueError
        resolve(profile["chosen"], lambda text: [0])
        fits = isinstance(profile["chosen"], str)
        if not fits or not all(
            isinstance(profile[key], dict) for key in ("best", "means", "bench")
        ):
            raise ValueError
    except (ForetellError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError("no profile") from error
    return dict(profile)


def kept(models: Mapping[str, Model], path: Path | None) -> tuple[dict[str, Any] | None, str]:
    """The profile of these models here, or None; beside it why one that is there does not count, in
    one line.
    """
    about = place(models)
    mine = file(models, path, about)
    cure = "is left aside; `foretell tune` measures anew"
    try:
        profile = read(mine)
        if profile["about"] == about:
            return profile, ""
        return None, f"{mine}: is of another place than its name says and {cure}"
    except ValueError:
        return None, f"{mine}: the profile is damaged and {cure}"
    except OSError:
        pass
    found = []
    for other in mine.parent.glob(f"{mine.name.partition('-')[0]}-*.json"):
        try:
            found.append((other.stat().st_mtime, read(other)["about"]))
        except (OSError, ValueError):
            continue  # neither of this place nor readable
    if not found:
        return None, ""
    old = max(found, key=lambda pair: pair[0])[1]
    said = "; ".join(
        key
        if key in ("weights", "draft model")
        else f"{'dtype ' * (key == 'dtype')}{old.get(key)} there, {new} here"
        for key, new in about.items()
        if old.get(key) != new
    )
    return None, f"the profile of {models['target'].name} is of another place ({said}) and {cure}"


def eligible(name: str, strategy: Strategy) -> bool:
    """Whether `auto` may stand for it: exact, and free to draft nothing where that is quicker, at
    any temperature.
    """
    if guarantee(name) != "exact":
        return False
    if not isinstance(strategy, Speculative):
        return name == "plain"
    return not (strategy.nodes or strategy.rule or strategy.drafter.draws or strategy.drafter.whole)


def ahead(means: Mapping[str, float], able: Sequence[str], default: str) -> str | None:
    """The best of `able` by their means, if it is ahead of the default."""
    best = max(
        (name for name in able if name in means), key=lambda name: means[name], default=default
    )
    return best if means.get(best, 0.0) > AHEAD * means.get(default, 0.0) else None


def plan(seconds: float, contenders: int, kinds: int, limit: float) -> tuple[int, int, int]:
    """The first of SIZES that fits into `limit` seconds, else the last. `seconds`: of a plain
    token.
    """
    for tokens, prompts, rounds in SIZES:
        # A method takes less than plain decoding: half of it, with the prompt's forward.
        if (
            seconds * tokens * (1 + 0.5 * (contenders - 1)) * prompts * kinds * (rounds + 1)
            <= limit
        ):
            return tokens, prompts, rounds
    return SIZES[-1]


def tune(
    lm: LM,
    sets: Mapping[str, Sequence[Prompt]],
    methods: Sequence[str] = CANDIDATES,
    *,
    model: str = "",
    tell: Tell = lambda what, done, total: None,
) -> dict[str, Any]:
    """Measures costs, the memory and the methods on `lm`, writes the profile and returns it; `auto`
    follows at once.

    `sets`: prompts by kind of text, of which the first few are taken. Raises BadConfig or
    UnknownMethod for a wrong method, and what a method's run raises if all fail.
    """
    from foretell.measure import bench, report

    began = time.perf_counter()
    # What is wrong is said before anything takes time.
    known = {spec: lm.resolve(spec) for spec in ("plain", *methods) if spec != "auto"}
    lm.measure(fresh=True)
    default = lm.default
    known[default] = lm.resolve(default)
    specs = list(
        dict.fromkeys((default, *(default if spec == "auto" else spec for spec in methods)))
    )
    first = lm._encode(next(iter(sets.values()))[0])
    plain, pace = bench.Method(lm, "plain"), 0.0
    for _ in range(2):  # the first warms up
        run = plain.run([first], 24, 0.0, 0)[0]
        pace = run.times[-1] / len(run.tokens)
    name = model or lm.models["target"].name
    computed = numbers(lm.models["target"])

    def compare(
        specs: Sequence[str], limit: float
    ) -> tuple[dict[str, Any], report.Table, dict[str, float]]:
        tokens, prompts, rounds = plan(pace, len(specs) + 1, len(sets), limit)
        settings = bench.Settings(
            models=(name,),
            dtypes=(computed,),
            methods=tuple(specs),
            max_new_tokens=tokens,
            rounds=rounds,
        )
        some = {kind: list(rows[:prompts]) for kind, rows in sets.items()}
        document = bench.bench(settings, some, lambda *_: lm, bench.begin(settings, some), tell)
        (table,) = report.tables(document)
        return (
            document,
            table,
            {spec: mean for spec in table.rows if (mean := table.mean(spec)) is not None},
        )

    document, table, means = compare(specs, SECONDS[0])
    for cell in document["cells"]:
        cell.pop("timeline", None)  # the larger part, and of no use here
    if "plain" not in means:
        why = "; ".join(report.failures(document)) or "their answers are too short"
        raise BadConfig(f"{name}: cannot be measured on these prompts ({why}); give others")
    able = [spec for spec, (label, strategy) in known.items() if eligible(label, strategy)]
    ratios = {
        kind: {
            spec: cells[kind]["ratio"]["median"]
            for spec, cells in table.rows.items()
            if cells[kind].get("ratio")
        }
        for kind in table.sets
    }
    challenger, final = ahead(means, able, default), None
    if challenger is not None:
        _, _, again = compare([default, challenger], SECONDS[1])
        final = {"challenger": challenger, "means": again}
        challenger = ahead(again, [challenger], default)
    about = place(lm.models)
    path = file(lm.models, lm.path, about)
    profile: dict[str, Any] = {
        "schema": SCHEMA,
        "about": about,
        "model": name,
        "default": default,
        "chosen": challenger or default,
        "means": means,
        "final": final,
        "best": {
            kind: max(found, key=lambda spec, found=found: found[spec])
            for kind, found in ratios.items()
        },  # type: ignore[misc]
        "shown_only": [spec for spec in known if spec not in able],
        "file": str(path),
        "seconds": time.perf_counter() - began,
        "bench": document,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(profile, indent=1) + "\n", "utf-8")
        os.replace(part, path)
    except OSError as error:
        raise BadConfig(
            f"{path}: cannot be written ({error.strerror}); set FORETELL_CACHE to another folder"
        ) from None
    lm._auto = None
    return profile
