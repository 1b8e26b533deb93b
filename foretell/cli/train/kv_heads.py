"""`foretell train kv-heads`: makes of a model one that caches fewer key heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._loading import quiet
from foretell.cli._options import Json
from foretell.cli._output import emit, emit_json, progress_bar, refusals
from foretell.cli._settings import settings_of

if TYPE_CHECKING:
    from foretell.train.caches.kv_heads import TrainKVHeads as Settings
else:
    Settings = settings_of("caches.kv_heads", "TrainKVHeads")


def kv_heads(
    *,
    target: Annotated[str, typer.Option(help="The model whose heads are merged.")],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder of the run; the model is OUT/model.")
    ],
    text: Annotated[
        list[str],
        typer.Option(
            metavar="SOURCE",
            help="Texts to learn from: stdlib, a folder, a .jsonl or a text file. Repeatable.",
        ),
    ],
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 300.0,
    settings: Settings,
    as_json: Json = False,
) -> int:
    """Make of a model one that caches fewer key heads. Run again, it goes on where it was."""
    import foretell
    from foretell.train.caches.kv_heads import TrainKVHeads, train
    from foretell.train.corpus import documents

    config = TrainKVHeads(**dataclasses.asdict(settings))

    def texts() -> Iterator[str]:
        for source in text:
            for _, document in documents(source):
                yield document.encode("utf-8", "replace").decode()

    with quiet(), refusals(f"--out {out}"):
        lm = foretell.load(target, dtype="float32", executor="torch")
        with progress_bar() as progress:
            bar = progress.add_task("reading", total=None)

            def tell(what: str, done: int, total: int | None) -> None:
                progress.update(bar, description=what, completed=done, total=total)
                progress.refresh()

            report = train(lm, texts(), out, config, save_every, tell=tell)
    if as_json:
        emit_json({"folder": str(out), **report})
        return 0
    heads, told = report["heads"], report["perplexity"]
    after = f" and {told['tuned']:.2f} tuned" if "tuned" in told else ""
    emit(
        f"{out / 'model'}: {heads['after']} key heads in place of {heads['before']}; perplexity of "
        f"texts held out {told['before']:.2f} before, {told['merged']:.2f} merged{after}"
    )
    return 0
