"""`foretell datastore`: indexes texts for the method `rest`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from foretell.cli._input import source_texts
from foretell.cli._loading import load_tokenizer
from foretell.cli._output import emit, progress_bar, refusals

BATCH = 64  # documents encoded at a time


def datastore(
    text: Annotated[
        list[str],
        typer.Argument(metavar="TEXT...", help="`stdlib`, folders, .jsonl or text files."),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="MODEL", help="The model whose tokens are stored: `demo`, a folder or a hub id."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="FILE.safetensors", help="The file to write, whole or not at all."),
    ],
) -> int:
    """Index texts for the method `rest`, which looks up what follows in them."""
    from foretell.drafters.lookup.datastore import build_datastore

    text_tokenizer = load_tokenizer(tokenizer)

    def tokens() -> Iterator[list[int]]:
        rest = source_texts(text)
        while batch := list(itertools.islice(rest, BATCH)):
            coded = text_tokenizer(batch, add_special_tokens=False, return_attention_mask=False)
            yield from coded["input_ids"]

    def decode(ids: Sequence[int]) -> str:  # as LM.decode does, with whose texts it is compared
        decoded = text_tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(decoded)

    with progress_bar() as progress, refusals(f"--out {out}"):
        bar = progress.add_task("reading", total=None)

        def tell(activity: str, completed: int, total: int | None) -> None:
            progress.update(bar, description=activity, completed=completed, total=total)

        store = build_datastore(out, tokens(), decode, tell)
    emit(
        f"{out}: {store.documents:,} documents, {len(store.tokens):,} tokens, "
        f"{store.nbytes / 1e6:,.1f} MB; use it with --method rest:path={out}"
    )
    return 0
