"""The layout of IBM's MLP speculators, which vLLM and text-generation-inference serve.

`speculator.{emb,proj,head,ln}.{i}` are the table, the projection, the output matrix and the norm of
step i. With `tie_weights` all steps have those of the first, and the projection of the second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from foretell.drafters.heads.formats.base import Format, write_folder
from foretell.drafters.heads.formats.checkpoint import Checkpoint
from foretell.drafters.heads.networks.base import Head
from foretell.drafters.heads.networks.folder import build, target_shape
from foretell.drafters.heads.networks.mlp_speculator import EPS, STEPS, MlpSpeculator
from foretell.drafters.heads.networks.output import Output
from foretell.errors import BadConfig

PREFIX = "speculator."
MOST = 64  # steps that the network can have
CHILDREN = (5, 4, 3)  # by step, as published models draft; further steps have one


class MlpSpeculatorFormat(Format):
    """MLP speculators'."""

    name = "mlp-speculator"
    kind = "mlp-speculator"
    writes = True
    ways = ()

    def matches(self, checkpoint: Checkpoint) -> bool:
        names = [f"{part}.0.weight" for part in ("emb", "proj", "head", "ln")]
        return any(
            all(f"{prefix}{name}" in checkpoint for name in names) for prefix in ("", PREFIX)
        )

    def load(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        config, shape = checkpoint.config, target_shape(target)
        checkpoint.check_sizes(config, {"emb_dim": shape.hidden, "vocab_size": shape.vocab})
        checkpoint.drop_prefix(PREFIX)
        tied = bool(config.get("tie_weights", False))
        steps = self.steps(checkpoint, tied)
        options = {
            "own_matrix": shape.vocab,
            "inner": checkpoint.whole_number({"inner_dim": 0, **config}, "inner_dim", 0, 1 << 20),
            "steps": steps,
            "tied": tied,
            "scaled": bool(config.get("scale_input", False)),
        }
        head = build(self.kind, shape, options)
        checkpoint.check_tokens(target)
        checkpoint.fill(head, tensor_names(steps, tied), self.copies(checkpoint, steps, tied))
        return head, None

    def steps(self, checkpoint: Checkpoint, tied: bool) -> int:
        """Counted in the file, unless it has steps that share weights once. Raises BadModel."""
        found = checkpoint.numbers(r"emb\.(\d+)\.weight")
        told = checkpoint.config.get("n_predict", len(found))
        if type(told) is not int or not 1 <= told <= MOST or (tied and told < 2):
            least = 2 if tied else 1
            raise checkpoint.bad(f"n_predict={told!r} must be a number from {least} to {MOST}")
        if tied and found == {0}:
            return told
        return checkpoint.counted(found, "n_predict", "the table of step")

    def copies(self, checkpoint: Checkpoint, steps: int, tied: bool) -> set[str]:
        """Names under which a file has again what its steps share. Raises BadModel."""
        if not tied:
            return set()
        again: set[str] = set()
        for part, first in (("emb", 0), ("head", 0), ("ln", 0), ("proj", 1)):
            for end in ("weight", "bias") if part == "ln" else ("weight",):
                names = [f"{part}.{i}.{end}" for i in range(first, steps)]
                here = [name for name in names if name in checkpoint]
                if len(here) > 1:
                    checkpoint.check_same(here)
                again |= {*names[1:]}
        return again

    def write(self, head: Head, kept: torch.Tensor | None, target: Any, folder: Path) -> None:
        made: Any = head
        if head.kind != self.kind:
            raise BadConfig(f"{self.name}: holds no {head.kind} head; write --to foretell")
        if made.stages is None:
            head = made = folded(made, target)
        steps, tied = head.option("steps"), bool(head.option("tied"))
        own = head.state_dict()
        names = tensor_names(steps, tied)
        tensors = {f"{PREFIX}{theirs}": own[ours] for theirs, ours in names.items()}
        shape = head.config.target
        children = [*CHILDREN, *[1] * steps][:steps]
        config = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": shape.vocab,
            "emb_dim": shape.hidden,
            "inner_dim": head.option("inner"),
            "n_predict": steps,
            "top_k_tokens_per_head": children,
            "n_candidates": 5,
            "tie_weights": tied,
            "scale_input": bool(head.option("scaled")),
        }
        write_folder(folder, "model.safetensors", tensors, config)


@torch.no_grad()
def folded(head: MlpSpeculator, target: Any) -> MlpSpeculator:
    """A head with tables of its own that drafts, of all the target's tokens, the ones that `head`
    would draft of them.

    What is linear between a token and the state goes into the table, what is between the state and
    the logits into the output matrix, and so does the centring of the layer's norm, which the
    layout's lacks. The last norm is left out: it makes all logits of a row longer or shorter, which
    changes chances, and no order.
    """
    shape = head.config.target
    options = {"own_matrix": shape.vocab, "steps": STEPS, "tied": True, "scaled": True}
    made: Any = build(head.kind, shape, options)
    # The layout has a fixed eps in its norm: what is normed is scaled so that it acts as ours.
    scale = (EPS / head.inner.eps) ** 0.5

    def centred(matrix: torch.Tensor) -> torch.Tensor:
        """Along the numbers of a state, which are `matrix`'s rows."""
        return scale * (matrix - matrix.mean(0))

    device = head.read.weight.device
    embedded = target.embedded(torch.arange(shape.vocab, device=target.device)).to(device)
    tokens = head.taken(embedded.float(), None, 0)
    made.stages.tables[0].weight.copy_(centred(tokens.T).T * head.scale / made.scale)
    for ours, theirs in zip((head.first, head.project), made.stages.projections, strict=True):
        theirs.weight.copy_(centred(ours.weight))
    made.stages.norms[0].weight.copy_(head.inner.weight)
    made.stages.norms[0].bias.copy_(head.inner.bias)
    weight = Output(target, None).weight().to(device)
    made.matrix.weight.copy_((weight * head.norm.weight) @ head.out.weight)
    return made  # type: ignore[no-any-return]


def tensor_names(steps: int, tied: bool) -> dict[str, str]:
    """The names in files of a head's tensors -> ours."""
    names = {}
    for i in range(1 if tied else steps):
        names[f"emb.{i}.weight"] = f"stages.tables.{i}.weight"
        names[f"head.{i}.weight"] = "matrix.weight" if tied else f"matrix.{i}.weight"
        for end in ("weight", "bias"):
            names[f"ln.{i}.{end}"] = f"stages.norms.{i}.{end}"
    for i in range(min(steps, 2) if tied else steps):
        names[f"proj.{i}.weight"] = f"stages.projections.{i}.weight"
    return names
