"""`foretell audit`: checks on this machine what methods claim."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretell.cli._loading import check_writes, load_model
from foretell.cli._options import BackendOptions, Json, ModelOptions, check_method, split_specs
from foretell.cli._output import emit, emit_json, progress_bar


def audit(
    models: ModelOptions,
    backends: BackendOptions,
    method: Annotated[
        str, typer.Option(help="One method or several with commas: ngram:n=2,k=4,draft is two.")
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Prompts to use instead of the built-in ones."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens of each answer that is compared with plain decoding.")
    ] = 48,
    as_json: Json = False,
) -> int:
    """Check on this machine what methods claim. The exit code is 0 only if every claim held."""
    from foretell.bench.prompts import read_prompts

    specs = split_specs(method)
    for spec in specs:
        check_method(spec)
    texts = read_prompts(prompts) if prompts else None
    lm = load_model(models, backends)
    check_writes(lm, "audit")
    from foretell import audit as auditor

    with progress_bar() as progress:
        bar = progress.add_task("audit", total=None)

        def tell(activity: str, completed: int, total: int) -> None:
            progress.update(bar, description=activity, completed=completed, total=total)

        report = auditor.audit(
            lm, specs, texts, model=models.model, max_new_tokens=max_new_tokens, tell=tell
        )
    if as_json:
        emit_json(report.to_dict())
    else:
        emit(report.text())
    return 0 if report.all_held else 1
