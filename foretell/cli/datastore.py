"""`foretell datastore`: indexes texts for the method `rest`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from foretell.cli._input import texts_of
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
    from foretell.drafters.lookup.datastore import build

    coder = load_tokenizer(tokenizer)

    def tokens() -> Iterator[list[int]]:
        rest = texts_of(text)
        while batch := list(itertools.islice(rest, BATCH)):
            coded = coder(batch, add_special_tokens=False, return_attention_mask=False)
            yield from coded["input_ids"]

    def decode(ids: Sequence[int]) -> str:  # as LM.decode does, with whose texts it is compared
        decoded = coder.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(decoded)

    with progress_bar() as progress, refusals(f"--out {out}"):
        bar = progress.add_task("reading", total=None)

        def tell(what: str, done: int, total: int | None) -> None:
            progress.update(bar, description=what, completed=done, total=total)

        store = build(out, tokens(), decode, tell)
    emit(
        f"{out}: {store.documents:,} documents, {len(store.tokens):,} tokens, "
        f"{store.nbytes / 1e6:,.1f} MB; use it with --method rest:path={out}"
    )
    return 0
