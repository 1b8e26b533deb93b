"""A head on a draft model that says how likely the model's own tokens are to be accepted.

It reads the hidden state that leaves the model's last layer at a drafted token, and is kept in a
safetensors file, which `foretell train acceptance-head` writes.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from foretell.errors import BadFile, first_message_line
from foretell.ops.files import replace_file

SCHEMA = "foretell.acceptance-head/1"
MAKE = "make one with `foretell train acceptance-head`"
BLOCKS = 3  # residual blocks of the published heads
TINY = 1e-6  # what a state of nothing but zeros is divided by


class Block(nn.Module):
    """h + SiLU(W h + b)."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + F.silu(self.linear(h))


class AcceptanceHead(nn.Module):
    """Residual blocks, each with weights of its own, and a linear layer to two classes.

    `width`: E, numbers of a hidden state.
    """

    def __init__(self, width: int, blocks: int = BLOCKS):
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.out = nn.Linear(width, 2)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """States (n, E) of drafted tokens -> logits (n, 2) of rejected and accepted."""
        h = states.to(self.out.weight)
        # States that leave a last layer differ in size from model to model, and from text to text.
        h = h / (h.square().mean(-1, keepdim=True).sqrt() + TINY)
        for block in self.blocks:
            h = block(h)
        logits: torch.Tensor = self.out(h)
        return logits

    @torch.inference_mode()
    def accept_chance(self, states: torch.Tensor) -> torch.Tensor:
        """States (n, E) -> the probabilities (n,) that these tokens are accepted if those before
        are.
        """
        return self(states).softmax(-1)[:, 1]


def save_acceptance_head(head: AcceptanceHead, path: Path) -> None:
    """Writes the file, whole or not at all. Raises BadFile."""
    tensors = {name: value.contiguous() for name, value in head.state_dict().items()}
    metadata = {"schema": SCHEMA, "width": str(head.width), "blocks": str(len(head.blocks))}
    with replace_file(path) as partial_path:
        save_file(tensors, partial_path, metadata)


def load_acceptance_head(path: str | Path) -> AcceptanceHead:
    """The head in a file. Raises BadFile where it cannot be read, is damaged or is no head."""
    try:
        with safe_open(path, "pt") as head_file:
            metadata = head_file.metadata() or {}
            names = head_file.keys()
            tensors = {name: head_file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise BadFile(f"{path}: cannot be read ({first_message_line(error)}); {MAKE}") from error
    width, blocks = (metadata.get(name, "") for name in ("width", "blocks"))
    has_schema = metadata.get("schema") == SCHEMA and width.isdecimal() and blocks.isdecimal()
    if not has_schema or int(blocks) > len(tensors):
        raise BadFile(f"{path}: is no acceptance head of schema {SCHEMA}; {MAKE}")
    try:
        with torch.device("meta"):  # a false header takes no memory
            head = AcceptanceHead(int(width), int(blocks))
        head.load_state_dict(tensors, assign=True)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        problem = "its tensors are not those of such a head"
        raise BadFile(f"{path}: is damaged ({problem}); {MAKE}") from error
    if not all(bool(value.isfinite().all()) for value in head.state_dict().values()):
        raise BadFile(f"{path}: is damaged (a weight is not a finite number); {MAKE}")
    return head.requires_grad_(False).float().eval()
