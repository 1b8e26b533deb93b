"""`foretell trim`: chooses the tokens that a draft model's head keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli._input import source_texts
from foretell.cli._loading import load_model
from foretell.cli._options import ModelOptions
from foretell.cli._output import check_writable, emit, message, progress_bar, show, table
from foretell.errors import BadConfig, Unsupported

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.drafters.model.vocabulary import Ranking


def trim(
    text: Annotated[
        list[str],
        typer.Argument(metavar="TEXT...", help="`stdlib`, folders, .jsonl or text files."),
    ],
    models: ModelOptions,
    out: Annotated[Path, typer.Option(metavar="FILE.json", help="The file to write.")],
    answers: Annotated[
        int,
        typer.Option(
            min=0, help="Let the model continue each text by so many tokens, and count those alone."
        ),
    ] = 0,
    prompt: Annotated[
        int, typer.Option(min=1, help="Tokens of each text that the model continues.")
    ] = 256,
    alpha: Annotated[
        float, typer.Option(help="What coverage counts, against the share of work that is saved.")
    ] = 0.5,
    coverage: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the counted tokens kept at least.")
    ] = 0.95,
    size: Annotated[int, typer.Option(min=0, help="Tokens to keep; 0: as many as pay.")] = 0,
) -> int:
    """Choose the tokens that a draft model's head keeps, by how often texts have them."""
    if not 0 < alpha <= 1:
        raise BadConfig.field("--alpha", alpha, "above 0 and at most 1")
    check_writable("--out", out)
    if models.draft_vocab is not None:
        raise BadConfig("--draft-vocab: the draft model is cut down already; leave it out")
    from foretell.drafters.model import vocabulary as trimming
    from foretell.drafters.model.trimming import head_share
    from foretell.models.decoder.decoder import Decoder

    lm = load_model(models, profile=False)
    draft = lm.models.get("draft")
    if not isinstance(draft, Decoder):
        name = models.model if draft is None else draft.name
        cure = "give --draft"
        raise Unsupported.missing_capability(
            "foretell trim", name, "a draft model of transformers", cure
        )
    counts = trimming.counts_of(_counted_tokens(lm, text, answers, prompt), draft.vocab)
    ranking = trimming.Ranking(counts, _special_tokens(lm, draft.vocab), head_share(draft))
    chosen_size = size or ranking.best_size(alpha, coverage)
    if not ranking.least <= chosen_size <= ranking.vocab:
        allowed_values = f"{ranking.least} (special tokens) to {ranking.vocab}, or 0"
        raise BadConfig.field("--size", size, allowed_values)
    rows = ranking.size_table(alpha, chosen_size)
    trimming.save_kept_tokens(out, ranking.kept_tokens(chosen_size), ranking.vocab, lm.decode, rows)
    _print_sizes(ranking, rows, chosen_size, 1 - coverage)
    emit(f"{out}: {chosen_size:,} of {ranking.vocab:,} tokens; use it with --draft-vocab {out}")
    return 0


def _counted_tokens(
    lm: LM, sources: Sequence[str], answers: int, prompt: int
) -> Iterator[list[int]]:
    """The tokens to count: of the texts themselves, or of what the model writes after each."""
    with progress_bar() as progress:
        bar = progress.add_task("answering" if answers else "reading", total=None)
        for texts_done, text in enumerate(source_texts(sources), 1):
            ids = lm.encode(text, special=False)
            if answers:
                ids = lm.generate(ids[:prompt], max_new_tokens=answers).tokens
            yield ids
            progress.update(bar, completed=texts_done)


def _special_tokens(lm: LM, vocab: int) -> set[int]:
    """The ends of texts and the tokenizer's special tokens."""
    tokenizer: Any = lm.tokenizer
    added_tokens = getattr(tokenizer, "added_tokens_decoder", {})
    special_ids = {token for token, added_token in added_tokens.items() if added_token.special}
    return {token for token in special_ids | {*lm.engine.eos} if token < vocab}


def _print_sizes(
    ranking: Ranking, rows: Sequence[dict[str, float]], chosen_size: int, max_unseen: float
) -> None:
    sizes = table("tokens", "covers", "saves", "worth", "")
    for row in rows:
        figures = [f"{row[name]:.1%}" for name in ("coverage", "saved")]
        mark = "chosen" if row["size"] == chosen_size else ""
        sizes.add_row(f"{row['size']:,}", *figures, f"{row['utility']:.4f}", mark)
    show(f"{ranking.total:,} tokens counted", soft_wrap=True)
    show(sizes)
    if ranking.unseen > max_unseen:
        message(
            f"these are few texts: about {ranking.unseen:.0%} of the tokens of others like them "
            "stand in none of these (by how many stand here once), so they cover less; give more"
        )
