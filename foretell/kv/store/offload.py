"""Stores rows in files, and reads them a layer at a time: offloading.

A prompt is stored when it is read; after it every `block` tokens are, and until then they stay in
memory. Every request has a folder of its own, which is removed when the request ends. Joined with
an encoder, its codes are stored: `gear+offload`.

Paper: Sheng et al., FlexGen: High-Throughput Generative Inference of Large Language Models with a
Single GPU, arXiv:2303.06865
Guarantee: exact
Cost: target 1, and reading all stored rows once; in memory the rows of one layer
Needs: cache rows of every layer, of all of the text
Trains: nothing
Differs:
- rows alone lie in files, no weights, and a request's share is all but its last tokens'
- blocks are read when a layer needs them; nothing is fetched ahead
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from foretell.core.settings import Range
from foretell.kv.base import KV
from foretell.kv.store.base import Stored
from foretell.kv.store.spilling import Files, writable_folder

if TYPE_CHECKING:
    from foretell.core.model import Model

CURE = "free some space, or name another folder: offload:dir=FOLDER"


@dataclass(frozen=True)
class Offload(KV):
    """A folder, and a count of tokens."""

    role = "store"

    dir: str = ""  # folder that requests have theirs in; else the system's for temporary files
    # tokens that are stored together, where no encoder decides
    block: Annotated[int, Range(1)] = 64

    def build_policy(self, target: Model) -> Stored:
        self.check_target(target)
        folder = writable_folder(Path(self.dir or tempfile.gettempdir()), "offload:dir")
        return Stored(0, 0, self.block, shelf=Files(folder, CURE))
