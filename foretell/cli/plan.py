"""`foretell plan`: which draft model, draft length and batch would be fastest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column

from foretell.cli._loading import load_model
from foretell.cli._options import BackendOptions, Json, ModelOptions, split_numbers
from foretell.cli._output import emit_json, message, show, table
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.bench.planning import Choice, Fit, Planner

WEAK = 0.9  # R² below which a fit is told to be a weak one
MOST = 100_000  # combinations that are worked out for a batch


def plan(
    points: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.json",
            help="Measured points: lists `mat`, `verify` and `draft`; see the manual.",
        ),
    ],
    models: ModelOptions,
    backends: BackendOptions,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Measure the target's forwards here, in place of the list `verify`."
        ),
    ] = False,
    drafts: Annotated[
        list[str] | None,
        typer.Option(help="A draft model to measure here, in place of `draft`. Repeatable."),
    ] = None,
    batches: Annotated[
        str, typer.Option(help="Requests at once; without it, those that were measured.")
    ] = "",
    lengths: Annotated[
        str, typer.Option(help="Drafted tokens a step; without it, 1 to twice the longest.")
    ] = "",
    tokens: Annotated[
        str, typer.Option(help="Training tokens of the draft model; without it, the measured ones.")
    ] = "",
    parameters: Annotated[
        str, typer.Option(help="Parameters of the draft model; without it, the measured ones.")
    ] = "",
    as_json: Json = False,
) -> int:
    """Predict the speed of draft models, draft lengths and batches that were not measured."""
    requested_values: dict[str, Any] = {
        "--batches": _whole_numbers("--batches", batches, 1),
        "--lengths": _whole_numbers("--lengths", lengths, 1),
        "--tokens": _above_zero("--tokens", tokens),
        "--parameters": _above_zero("--parameters", parameters),
    }
    from foretell.bench.planning import Planner, read_points

    measured = read_points(points)
    if profile:
        measured["verify"] = _verify_here(models, backends)
    if drafts:
        measured["draft"] = _drafts_here(drafts, models, backends)
    for name, option in (("verify", "--profile"), ("draft", "--drafts MODEL three times or more")):
        if name not in measured:
            raise BadConfig(f"{points}: has no list {name!r}; add it, or give {option}")
    planner = Planner(measured)
    mat = measured["mat"]
    longest = int(max(point["length"] for point in mat))
    grid: dict[str, Any] = {
        "lengths": requested_values["--lengths"] or tuple(range(1, 2 * longest + 1)),
        "tokens": requested_values["--tokens"]
        or _distinct_values(point["tokens"] for point in mat),
        "parameters": requested_values["--parameters"]
        or _distinct_values(point["parameters"] for point in mat),
    }
    count = len(grid["lengths"]) * len(grid["tokens"]) * len(grid["parameters"])
    if count > MOST:
        raise BadConfig(f"{count:,} combinations are more than {MOST:,}: name fewer values")
    batch_sizes = requested_values["--batches"] or _distinct_values(
        int(p["batch"]) for p in measured["verify"]
    )
    best_choices = [planner.best_choice(batch, **grid) for batch in batch_sizes]
    if as_json:
        emit_json(_plan_document(planner, best_choices))
    else:
        _print_plan(planner, best_choices)
    return 0


# --- what was asked for


def _whole_numbers(option: str, text: str, lower: int) -> tuple[int, ...]:
    whole_numbers = split_numbers(option, text, int)
    if any(number < lower for number in whole_numbers):
        raise BadConfig(f"{option} {text}: must be whole numbers of at least {lower}")
    return whole_numbers


def _above_zero(option: str, text: str) -> tuple[float, ...]:
    positive_numbers = split_numbers(option, text, float)
    if not all(0 < number < float("inf") for number in positive_numbers):
        raise BadConfig(f"{option} {text}: must be numbers above 0")
    return positive_numbers


def _distinct_values(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sorted(set(values)))


# --- what is measured here


def _verify_here(models: ModelOptions, backends: BackendOptions) -> Any:
    from foretell.bench.planning import verify_points
    from foretell.engine.cost_profile import profile_model
    from foretell.speculation.costs import SIZES

    lm = load_model(models, backends, profile=False)
    costs, _ = profile_model(lm.models["target"])
    return verify_points(costs, SIZES[-1])


def _drafts_here(names: list[str], models: ModelOptions, backends: BackendOptions) -> Any:
    from foretell.bench.planning import draft_points
    from foretell.engine.cost_profile import profile_model
    from foretell.speculation.costs import SIZES

    points = []
    for name in names:
        draft_options = dataclasses.replace(models, model=name, draft=None, named=None)
        model = load_model(draft_options, backends, profile=False).models["target"]
        hf = getattr(model, "hf", None)
        if hf is None:
            raise BadConfig(
                f"--drafts {name}: its parameters cannot be counted; list `draft` points"
            )
        costs, _ = profile_model(model)
        points += draft_points(float(hf.num_parameters()), costs, SIZES[-1])
    return points


# --- what is told


def _plan_document(planner: Planner, best_choices: list[Choice]) -> dict[str, Any]:
    fits = {}
    for name, fit in (("mat", planner.mat), ("verify", planner.verify), ("draft", planner.draft)):
        fits[name] = {"coefficients": fit.coefficients.tolist(), "r2": fit.r2, "spread": fit.spread}
    return {
        "fits": fits,
        "reference_length": planner.reference,
        "checks": [dataclasses.asdict(check) for check in planner.checks()],
        "best": [dataclasses.asdict(choice) for choice in best_choices],
    }


def _print_plan(planner: Planner, best_choices: list[Choice]) -> None:
    a, b, c = planner.mat.coefficients
    drafted = f"with drafts of {planner.reference}"
    show(
        f"MAT = {a:.4g} {b:+.4g} log D {c:+.4g} log N {drafted}, R² {planner.mat.r2:.4f}",
        soft_wrap=True,
    )
    _print_seconds("t_verify", planner.verify, "", "batch", "batch x length")
    _print_seconds("t_draft", planner.draft, "", "N", "N x batch")
    for name, fit in (
        ("MAT", planner.mat),
        ("t_verify", planner.verify),
        ("t_draft", planner.draft),
    ):
        if fit.r2 < WEAK:
            message(
                f"{name}: R² {fit.r2:.2f}, so sizes explain little of what was measured; "
                "give more points before you go by what follows"
            )
    show("")
    checks = planner.checks()
    if checks:
        rows = table("D", "N", "length", "measured MAT", "predicted by the others")
        for check in checks:
            point = check.point
            sizes = (f"{point['tokens']:.3g}", f"{point['parameters']:.3g}", f"{point['length']:g}")
            prediction = f"{check.mat:.2f} ± {check.mat_error:.2f}"
            if check.speed is not None:
                prediction += f"; {check.speed:,.0f} of {point['speed']:,.0f} tokens/s"
            rows.add_row(*sizes, f"{point['mat']:.2f}", prediction)
        show(rows)
        show("")
    else:
        message("too few points to predict each by the others")
    rows = table(Column("best", no_wrap=True), "D", "N", "length", "MAT", "tokens/s", "to plain")
    for choice in best_choices:
        size = (f"{choice.tokens:.3g}", f"{choice.parameters:.3g}") if choice.length else ("", "")
        rows.add_row(
            f"batch {choice.batch}",
            *size,
            str(choice.length),
            f"{choice.mat:.2f} ± {choice.mat_error:.2f}",
            f"{choice.speed:,.0f} ± {choice.speed_error:,.0f}",
            f"{choice.ratio:.2f}x",
        )
    show(rows)


def _print_seconds(name: str, fit: Fit, *features: str) -> None:
    pairs = zip(fit.coefficients.tolist(), features, strict=True)
    terms = " + ".join(f"{number:.3g} {feature}".strip() for number, feature in pairs)
    show(f"{name} = {terms} s, R² {fit.r2:.4f}", soft_wrap=True)
