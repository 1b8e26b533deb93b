"""Reads contexts as a quarter of their rows, which a trained encoder makes; the model stays.

Each context is encoded by itself: all of its tokens see each other, and before the encoder's last
layer the states of neighbouring tokens are averaged, so that 4 or 8 tokens become one. A projection
brings what leaves it to the width of the target's embeddings, and the target reads these rows
where it would read the tokens, and a learned row after them. `foretell train compressor` makes
the encoder of a target: a copy of the target's layers, without the last two, learns to say what the
target needs in order to go on with a text, or to repeat it.

Paper: Pilchen et al., ARC-Encoder: learning compressed text representations for large language
models, arXiv:2510.20535
Guarantee: lossy: contexts are read as fewer rows; with drafts the text is the one without them
Cost: target 1
Needs: layers that can be run one by one; cache rows of every layer, of all of the text
Trains: an encoder, `foretell train compressor --kind arc-encoder`
Try: --model MODEL --kv arc-encoder:folder=FOLDER --context FILE
Differs:
- prompts keep all of their tokens, so that drafters and draft models copy from contexts as they are
- a token of a context has, for who reads hidden states, the state of its row; it has zeros where
the context is read in several pieces and it is not of the last one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from foretell.core.settings import Range
from foretell.kv.encoded.base import Compressing


@dataclass(frozen=True)
class ArcEncoder(Compressing):
    """Settings, and the places of contexts in a prompt: `contexts.Contexts` makes one with its
    tokens.
    """

    folder: str = ""  # of the encoder that was trained for the target
    prefix: Annotated[int, Range(0)] = 0  # first tokens, which precede all contexts
    # tokens of each context; what follows them is the question
    sizes: Annotated[tuple[int, ...], Range(1)] = ()

    kind = "arc-encoder"
