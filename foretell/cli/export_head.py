"""`foretell export-head`: writes a head in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretell.cli._loading import quiet_libraries
from foretell.cli._output import emit
from foretell.errors import BadConfig


def export_head(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="A head: foretell's, or one that others publish."),
    ],
    *,
    model: Annotated[str, typer.Option(help="The model that it drafts for.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="LAYOUT",
            help="speculators (EAGLE-3), medusa, medusa-vllm, mlp-speculator, or foretell; "
            "without it, the first of them that holds such a head.",
        ),
    ] = "",
    taps: Annotated[
        str,
        typer.Option(
            help="What the layer numbers in a published head count: input or output of layers; "
            "without it, as the folder says."
        ),
    ] = "",
    check: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tokens that the model writes to measure whether the taps are right; 0: none.",
        ),
    ] = 64,
    prompt: Annotated[
        str, typer.Option(help="What the model answers for that.")
    ] = "Write a short story about a lighthouse.",
) -> int:
    """Write a head in the layout of another engine, or a published one in foretell's."""
    import foretell
    from foretell.bench.sets import prompt_ids
    from foretell.drafters.heads.formats import reading
    from foretell.drafters.heads.networks import folder as own

    writers = {name: format for name, format in reading.list_formats().items() if format.writes}
    if to not in {"", reading.OWN, *writers}:
        raise BadConfig.field("--to", to, f"one of {', '.join([reading.OWN, *sorted(writers)])}")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise BadConfig(f"--out {out}: is there already; name a new folder")
    with quiet_libraries():
        lm = foretell.load(model, backend="torch")  # not every backend shows hidden states
    target = lm.models["target"]
    head, draft_tokens = reading.load_any_head(folder, target, taps=taps)
    if check:
        question_ids = prompt_ids(lm, [{"role": "user", "content": prompt}])
        answer = lm.generate([question_ids], "plain", max_new_tokens=check, temperature=0.0)[
            0
        ].tokens
        tokens = [*question_ids, *answer]
        shares = reading.check_taps(folder, target, tokens, taps)
        share_text = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        emit(f"right on the {len(tokens)} tokens of a question and its answer: {share_text}")
    to = to or next((name for name in writers if writers[name].kind == head.kind), reading.OWN)
    out.mkdir(parents=True, exist_ok=True)
    if to == reading.OWN:
        own.save_head(head, draft_tokens, out, target, {})
    else:
        writers[to].write_head(head, draft_tokens, target, out)
    emit(f"{out}: a head of kind {head.kind} in the layout {to}")
    return 0
