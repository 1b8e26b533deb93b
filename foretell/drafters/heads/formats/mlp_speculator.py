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
from foretell.drafters.heads.networks.folder import build_head, target_shape
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

    def matches_folder(self, checkpoint: Checkpoint) -> bool:
        names = [f"{part}.0.weight" for part in ("emb", "proj", "head", "ln")]
        return any(
            all(f"{prefix}{name}" in checkpoint for name in names) for prefix in ("", PREFIX)
        )

    def load_head(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        config, shape = checkpoint.config, target_shape(target)
        checkpoint.check_sizes(config, {"emb_dim": shape.hidden, "vocab_size": shape.vocab})
        checkpoint.drop_prefix(PREFIX)
        tied = bool(config.get("tie_weights", False))
        steps = self.count_steps(checkpoint, tied)
        options = {
            "own_matrix": shape.vocab,
            "inner": checkpoint.whole_number({"inner_dim": 0, **config}, "inner_dim", 0, 1 << 20),
            "steps": steps,
            "tied": tied,
            "scaled": bool(config.get("scale_input", False)),
        }
        head = build_head(self.kind, shape, options)
        checkpoint.check_tokens(target)
        checkpoint.fill_head(head, mlp_names(steps, tied), self.copy_names(checkpoint, steps, tied))
        return head, None

    def count_steps(self, checkpoint: Checkpoint, tied: bool) -> int:
        """Counted in the file, unless it has steps that share weights once. Raises BadModel."""
        step_numbers = checkpoint.part_numbers(r"emb\.(\d+)\.weight")
        declared = checkpoint.config.get("n_predict", len(step_numbers))
        if type(declared) is not int or not 1 <= declared <= MOST or (tied and declared < 2):
            minimum = 2 if tied else 1
            raise checkpoint.bad_model(
                f"n_predict={declared!r} must be a number from {minimum} to {MOST}"
            )
        if tied and step_numbers == {0}:
            return declared
        return checkpoint.counted(step_numbers, "n_predict", "the table of step")

    def copy_names(self, checkpoint: Checkpoint, steps: int, tied: bool) -> set[str]:
        """Names under which a file has again what its steps share. Raises BadModel."""
        if not tied:
            return set()
        shared_names: set[str] = set()
        for part, first_step in (("emb", 0), ("head", 0), ("ln", 0), ("proj", 1)):
            for end in ("weight", "bias") if part == "ln" else ("weight",):
                names = [f"{part}.{i}.{end}" for i in range(first_step, steps)]
                present_names = [name for name in names if name in checkpoint]
                if len(present_names) > 1:
                    checkpoint.check_same(present_names)
                shared_names |= {*names[1:]}
        return shared_names

    def write_head(
        self, head: Head, kept_tokens: torch.Tensor | None, target: Any, folder: Path
    ) -> None:
        mlp_head: Any = head
        if head.kind != self.kind:
            raise BadConfig(f"{self.name}: holds no {head.kind} head; write --to foretell")
        if mlp_head.stages is None:
            head = mlp_head = fold_head(mlp_head, target)
        steps, tied = head.option("steps"), bool(head.option("tied"))
        head_state = head.state_dict()
        names = mlp_names(steps, tied)
        tensors = {f"{PREFIX}{theirs}": head_state[ours] for theirs, ours in names.items()}
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
def fold_head(head: MlpSpeculator, target: Any) -> MlpSpeculator:
    """A head with tables of its own that drafts, of all the target's tokens, the ones that `head`
    would draft of them.

    What is linear between a token and the state goes into the table, what is between the state and
    the logits into the output matrix, and so does the centring of the layer's norm, which the
    layout's lacks. The last norm is left out: it makes all logits of a row longer or shorter, which
    changes probabilities, and no order.
    """
    shape = head.config.target
    options = {"own_matrix": shape.vocab, "steps": STEPS, "tied": True, "scaled": True}
    folded_head: Any = build_head(head.kind, shape, options)
    # The layout has a fixed eps in its norm: what is normed is scaled so that it acts as ours.
    scale = (EPS / head.inner.eps) ** 0.5

    def centre(matrix: torch.Tensor) -> torch.Tensor:
        """Along the numbers of a state, which are `matrix`'s rows."""
        return scale * (matrix - matrix.mean(0))

    device = head.read.weight.device
    embedded = target.embedded(torch.arange(shape.vocab, device=target.device)).to(device)
    tokens = head.token_rows(embedded.float(), None, 0)
    folded_head.stages.tables[0].weight.copy_(centre(tokens.T).T * head.scale / folded_head.scale)
    for ours, theirs in zip(
        (head.first, head.project), folded_head.stages.projections, strict=True
    ):
        theirs.weight.copy_(centre(ours.weight))
    folded_head.stages.norms[0].weight.copy_(head.inner.weight)
    folded_head.stages.norms[0].bias.copy_(head.inner.bias)
    weight = Output(target, None).train_weight().to(device)
    folded_head.matrix.weight.copy_((weight * head.norm.weight) @ head.out.weight)
    return folded_head  # type: ignore[no-any-return]


def mlp_names(steps: int, tied: bool) -> dict[str, str]:
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
