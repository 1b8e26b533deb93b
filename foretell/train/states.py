"""The target's hidden states of texts, which heads learn from.

They are computed once for all heads, beside the answers that answers.py wrote, a file for each of
its files:

    states   (n, F)   bfloat16: the taps of all its tokens side by side

and in the file's metadata which taps these are, and of which target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foretell.core.model import Model
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadFile, Unsupported
from foretell.ops.files import whole
from foretell.train.answers import Text, read

AT_ONCE = 1024  # tokens of one forward
Tell = Callable[[str, int, int], None]


@torch.inference_mode()
def states_of(model: Model, texts: Sequence[Text], taps: Sequence[int]) -> list[torch.Tensor]:
    """Of each text the taps (n, F) side by side."""
    jobs = []
    for text in texts:
        tokens = text.tokens.tolist()
        tree = TokenTree(tokens[0]).chain(tokens[1:])
        job, _ = model.cache().prepare(Ask(tree, rows=(), taps=tuple(taps)), tokens[:1], 1)
        jobs.append(job)
    found = []
    for job, reply in zip(jobs, model.forward(jobs), strict=True):
        found.append(torch.cat([reply.hidden[tap] for tap in taps], -1).bfloat16().cpu())
        job.cache.drop()
    return found


def write_states(
    model: Model,
    files: Sequence[Path],
    folder: Path,
    taps: Sequence[int],
    about: dict[str, str],
    tell: Tell | None = None,
) -> list[Path]:
    """A file of states for each of these files of answers; those that are there are kept.

    `about`: what tells the target, beside the taps. Raises Unsupported, BadFile.
    """
    if "taps" not in model.caps:
        cure = "load it with executor='torch', or another number format"
        raise Unsupported.missing("train head", model.name, "hidden states", cure)
    folder.mkdir(parents=True, exist_ok=True)
    told = {**about, "taps": json.dumps(list(taps))}
    written = []
    for number, file in enumerate(files):
        path = folder / f"{number:05}.safetensors"
        written.append(path)
        if path.exists():
            check(path, told)
        else:
            parts = []
            for group in groups(read(file)):
                parts += states_of(model, group, taps)
            with whole(path) as part:
                save_file({"states": torch.cat(parts)}, part, told)
        if tell is not None:
            tell("states", number + 1, len(files))
    return written


def groups(texts: Iterator[Text]) -> Iterator[list[Text]]:
    """The texts in order, about AT_ONCE tokens at a time."""
    group: list[Text] = []
    for text in texts:
        group.append(text)
        if sum(len(other.tokens) for other in group) >= AT_ONCE:
            yield group
            group = []
    if group:
        yield group


def check(path: Path, told: dict[str, str]) -> None:
    """Raises BadFile where a file of states is damaged, or of another target or other taps."""
    try:
        with safe_open(path, "pt") as opened:
            found: Any = opened.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise BadFile(f"{path}: no file of states ({error}); delete it to have it made") from error
    for name, value in told.items():
        if found.get(name) != value:
            raise BadFile(
                f"{path}: states of {name}={found.get(name)}, not {value}; choose another folder"
            )


def load_states(path: Path) -> torch.Tensor:
    """(n, F) bfloat16; it stays on disk until it is read. Raises BadFile."""
    try:
        with safe_open(path, "pt") as opened:
            states: torch.Tensor = opened.get_tensor("states")
    except (OSError, SafetensorError) as error:
        raise BadFile(f"{path}: no file of states ({error}); delete it to have it made") from error
    if states.dim() != 2 or not states.is_floating_point():
        raise BadFile(f"{path}: states are {tuple(states.shape)}; delete it to have it made")
    return states
