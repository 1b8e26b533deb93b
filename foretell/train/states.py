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
from foretell.ops.files import replace_file
from foretell.train.answers import Text, read_texts

AT_ONCE = 1024  # tokens of one forward
Tell = Callable[[str, int, int], None]


@torch.inference_mode()
def text_states(model: Model, texts: Sequence[Text], taps: Sequence[int]) -> list[torch.Tensor]:
    """States (n, F) of each text: its taps side by side."""
    text_jobs = []
    for text in texts:
        tokens = text.tokens.tolist()
        text_tree = TokenTree(tokens[0]).chain(tokens[1:])
        job, _ = model.cache().prepare(Ask(text_tree, rows=(), taps=tuple(taps)), tokens[:1], 1)
        text_jobs.append(job)
    states_of_texts = []
    for job, reply in zip(text_jobs, model.forward(text_jobs), strict=True):
        states_of_texts.append(torch.cat([reply.hidden[tap] for tap in taps], -1).bfloat16().cpu())
        job.cache.drop()
    return states_of_texts


def write_states(
    model: Model,
    files: Sequence[Path],
    folder: Path,
    taps: Sequence[int],
    metadata: dict[str, str],
    tell: Tell | None = None,
) -> list[Path]:
    """A file of states for each of these files of answers; those that are there are kept.

    `metadata`: what tells the target, beside the taps. Raises Unsupported, BadFile.
    """
    if "taps" not in model.caps:
        cure = "load it with backend='torch', or another number format"
        raise Unsupported.missing_capability("train head", model.name, "hidden states", cure)
    folder.mkdir(parents=True, exist_ok=True)
    file_metadata = {**metadata, "taps": json.dumps(list(taps))}
    written_files = []
    for number, file in enumerate(files):
        path = folder / f"{number:05}.safetensors"
        written_files.append(path)
        if path.exists():
            check_states(path, file_metadata)
        else:
            group_states = []
            for group in group_texts(read_texts(file)):
                group_states += text_states(model, group, taps)
            with replace_file(path) as part_path:
                save_file({"states": torch.cat(group_states)}, part_path, file_metadata)
        if tell is not None:
            tell("states", number + 1, len(files))
    return written_files


def group_texts(texts: Iterator[Text]) -> Iterator[list[Text]]:
    """The texts in order, about AT_ONCE tokens at a time."""
    group: list[Text] = []
    for text in texts:
        group.append(text)
        if sum(len(member.tokens) for member in group) >= AT_ONCE:
            yield group
            group = []
    if group:
        yield group


def check_states(path: Path, expected: dict[str, str]) -> None:
    """Raises BadFile where a file of states is damaged, or of another target or other taps."""
    try:
        with safe_open(path, "pt") as opened:
            file_metadata: Any = opened.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise BadFile(f"{path}: no file of states ({error}); delete it to have it made") from error
    for name, value in expected.items():
        if file_metadata.get(name) != value:
            raise BadFile(
                f"{path}: states of {name}={file_metadata.get(name)}, not {value}; "
                "choose another folder"
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
