"""Views of a decoder: models that share all of its weights, and differ in one part of its forward.

    Skipped    runs some of the layers: a quick draft of the model itself
    Extended   knows token ids beyond the vocabulary, with embeddings of their own
    Scored     has another head: rows are scores, such as a reward or a value

A view is a Model with its own caches and calls, so it stands beside its decoder in an engine. What
it is made of may itself be a view. torch computes it; the decoder's backend is not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.model import Computed, Model
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.layered import run_layers
from foretell.models.decoder.loop import Loop
from foretell.models.decoder.packed import weight_count
from foretell.ops.threads import torch_threads

if TYPE_CHECKING:
    from foretell.core.request import Request

Head = Callable[[torch.Tensor], torch.Tensor]


class View(Model):
    """The base of views: the decoder's own model. Raises Unsupported where the decoder's loop is
    not ours.
    """

    loop: Loop | None
    fused: bool
    hf: PreTrainedModel
    narrow: bool
    matrices: str | None
    exact_bits: bool
    cache_type: type[Cache]
    known_ids: int
    row_size: int

    def __init__(self, base: Decoder | View, part_name: str):
        reason = base.loop_refused if isinstance(base, Decoder) else "it is no torch model"
        if not isinstance(base, Decoder | View) or base.loop is None:
            raise Unsupported.missing_capability(
                f"a view of {part_name}",
                base.name,
                f"layers that can be run one by one ({reason})",
                "use a model of another family, such as llama or qwen3, computed by torch",
            )
        self.base = base
        self.name = f"{base.name}[{part_name}]"
        self.loop = base.loop
        self.fused = base.fused
        self.hf = base.hf
        self.mark = f"{weight_count(self.hf)} {part_name}"  # of its own costs
        self.narrow = base.narrow
        self.matrices = base.matrices
        self.exact_bits = base.exact_bits
        self.cache_type = base.cache_type
        self.vocab = base.vocab
        self.known_ids = base.known_ids
        self.row_size = base.row_size
        self.context = base.context
        self.layout = base.layout
        self.dtype = base.dtype
        self.device = base.device
        self.caps = base.caps

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache = self.cache_type(self.layout, self.dtype, self.device)
        return self.prepare_cache(cache, request, beside)

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        with torch_threads(self.threads_wanted or torch.get_num_threads()):
            return super().compute(jobs, taps)

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        row_indices: torch.Tensor,
        first_job: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        return run_layers(self, token_ids, positions, row_indices, first_job, taps)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.embedded(torch.tensor(tokens, device=self.device))

    # --- the parts of a forward; a view replaces one of them

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """States (..., E) that enter layer 0 for these ids."""
        return self.base.embedded(token_ids)

    def layers_to_run(self, layers: Sequence[Any] | None) -> Sequence[Any]:
        """The layers to run where a job names these; None: it wants them all."""
        return self.base.layers_to_run(layers)

    def head_rows(self, states: torch.Tensor) -> torch.Tensor:
        """Rows (n, `row_size`) of states (n, E) that left the last layer."""
        return self.base.head_rows(states)


class Skipped(View):
    """A view with only these layers run, which drafts for the whole model.

    Layers keep their numbers: taps and jobs name them as they do the decoder's, and a job that
    names layers gets those of them that the view has. Raises BadConfig for layers that are not
    there, or not in ascending order.

    Source: "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
    Decoding" (arXiv 2309.08168), section 3.1, with whole layers.
    """

    def __init__(self, base: Decoder | View, layers: Sequence[int]):
        super().__init__(base, f"layers {join_spans(layers)}")
        present = base.layers_to_run(None)
        if not layers or list(layers) != sorted({*layers} & {*present}):
            allowed_layers = f"some of {join_spans(present)}, each once and in ascending order"
            raise BadConfig.field("layers", list(layers), allowed_layers)
        self.layers = tuple(layers)
        self.layout = tuple(
            shape if layer in self.layers else None for layer, shape in enumerate(self.layout)
        )

    def layers_to_run(self, layers: Sequence[Any] | None) -> Sequence[Any]:
        layer_parts = self.base.layers_to_run(layers)
        return [
            layer_part
            for layer_part in layer_parts
            if (layer_part if isinstance(layer_part, int) else layer_part[0]) in self.layers
        ]


class Extended(View):
    """A view that knows more ids: the n ids from `base.known_ids` on, `vocab` of a decoder, enter
    layer 0 as `embeddings` (n, E). Rows keep the vocabulary.

    `embeddings` are what `embed` gives for other ids, so any scale of the family is in them
    already. The tensor is not copied: who trains it sees the change. Raises BadConfig for one of
    another shape, number format or device.

    Source: the prompt tokens of "Hardware-Aware Parallel Prompt Decoding" (arXiv 2405.18628),
    section 3, and the mask tokens of others.
    """

    def __init__(self, base: Decoder | View, embeddings: torch.Tensor):
        super().__init__(base, f"{len(embeddings)} more tokens")
        with torch.inference_mode():
            example = base.embed([0])
        is_fitting = embeddings.ndim == 2 and embeddings.shape[1] == example.shape[1]
        if (
            not is_fitting
            or embeddings.dtype != example.dtype
            or embeddings.device != example.device
        ):
            given_text = (
                f"a {embeddings.dtype} tensor {tuple(embeddings.shape)} on {embeddings.device}"
            )
            expected_text = f"(n, {example.shape[1]}) of {example.dtype} on {example.device}"
            raise BadConfig(f"embeddings: must be {expected_text}, not {given_text}")
        self.embeddings = embeddings
        self.known_ids = base.known_ids + len(embeddings)

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        first_id = self.base.known_ids
        is_added = token_ids >= first_id
        if not is_added.any():
            return self.base.embedded(token_ids)
        plain_states = self.base.embedded(token_ids.masked_fill(is_added, 0))
        added_states = self.embeddings[(token_ids - first_id).clamp_(min=0)]
        return torch.where(is_added[..., None], added_states, plain_states)


class Scored(View):
    """Rows are what `head` makes of the normed last states: (n, E) -> (n, k) scores, not logits.

    A reward model's head, or a value's. `caps` has "scores" in place of "rows": nothing is to be
    drawn from them or learnt from them as logits. Raises BadConfig where the head gives something
    else than rows. A classifier that stands alone is a scoring.Classifier.
    """

    def __init__(self, base: Decoder | View, head: Head):
        super().__init__(base, "scores")
        assert self.loop is not None
        self.norm: Head = self.loop.norm
        self.head = head
        if isinstance(head, nn.Module):
            head.eval()
        with torch.inference_mode():
            example = self.head_rows(base.embed([0]))
        if example.ndim != 2 or len(example) != 1:
            raise BadConfig(f"head: must give (n, k) scores, not {tuple(example.shape)} for n = 1")
        self.row_size = example.shape[1]
        self.caps = (base.caps - {"rows"}) | {"scores"}

    def head_rows(self, states: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(states))


def join_spans(numbers: Sequence[int]) -> str:
    """Writes numbers in ascending order as spans: 0-3,8."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(
        f"{first_number}-{last_number}" if last_number > first_number else str(first_number)
        for first_number, last_number in ranges
    )
