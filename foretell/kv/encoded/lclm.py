"""Reads contexts as means of a few encoded tokens each, by windows that can be changed alone.

A context is cut into windows of 1,024 tokens. An encoder reads each of them by itself; of 4, 8 or
16 neighbouring tokens the mean of their last states is one row, which an adapter brings to the
target. So a change in a window changes its rows only. The rows stand between two learned marks. A
context whose words matter is expanded: it stands before the question as plain text, while its rows
stay (`Contexts(..., expand=[2])`).

Paper: End-to-End Context Compression at Scale (LCLM); code: github.com/LeonLixyz/LCLM
Guarantee: lossy: contexts are read as fewer rows; with drafts the text is the one without them
Cost: target 1
Needs: layers that can be run one by one; cache rows of every layer, of all of the text
Trains: an encoder and an adapter, `foretell train compressor --kind lclm`
Try: --model MODEL --kv lclm:folder=FOLDER --context FILE
Differs:
- of the three published stages the last, in which the target learns too and becomes another model,
comes only where `--whole` of the training says for how many of the steps
- the marks around a context are learned rows, as the tokenizer has no tokens for them
- who asks says which contexts are expanded; no tool is called in the middle of an answer
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
class Lclm(Compressing):
    """Settings, and the places of contexts in a prompt: `contexts.Contexts` makes one with its
    tokens.
    """

    folder: str = ""  # of the encoder and the adapter that were trained for the target
    prefix: Annotated[int, Range(0)] = 0  # first tokens, which precede all contexts
    # tokens of each context; what follows them is the question
    sizes: Annotated[tuple[int, ...], Range(1)] = ()

    kind = "lclm"
