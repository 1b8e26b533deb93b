"""DiffusionGemma as a Model: canvases of uniform noise after a text.

Its encoder reads the text, its decoder a canvas over the encoder's rows: the same layers, but for a
scale that each has of its own. Beside each position of a canvas the decoder reads what it said of
it in the step before. Transformers' own modules run on packed rows; attention is ours. Pictures,
which the encoder could see, are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.masked_text import NOISE
from foretell.core.model import STEP, Computed, Model
from foretell.errors import Unsupported
from foretell.models.decoder.decoder import context_of
from foretell.models.decoder.loop import use_attention
from foretell.models.diffusion.renoised import BehindText, TextCache, pack_jobs, split_jobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretell.cache.cache import Cache
    from foretell.cache.job import Job
    from foretell.core.request import Request

KIND = "diffusion_gemma"  # its model_type


class DiffusionGemma(Model):
    """A model of canvases of uniform noise. `canvas_length`: positions of the canvases that it was
    taught. Raises Unsupported for one whose text does not read from left to right.
    """

    caps = frozenset({"canvas", NOISE})
    reads_segments = False

    def __init__(self, hf_model: PreTrainedModel, model_name: str = "model"):
        self.hf: Any = hf_model.eval()
        self.name = model_name
        self.config = hf_model.config.get_text_config()
        if self.config.use_bidirectional_attention == "all":
            need = "a text that is read from left to right"
            raise Unsupported.missing_capability(
                "foretell", model_name, need, "use transformers' own generate"
            )
        self.device, self.dtype = hf_model.device, hf_model.dtype
        self.encoder, self.decoder = self.hf.model.encoder.language_model, self.hf.model.decoder
        self.vocab = self.known_ids = int(self.config.vocab_size)
        self.context = context_of(self.config)
        self.canvas_length = int(self.hf.config.canvas_length)
        self.weight_bytes = sum(
            parameter.numel() * parameter.element_size() for parameter in hf_model.parameters()
        )
        shapes = []
        for layer in self.encoder.layers:
            attention = layer.self_attn
            key_heads = attention.k_proj.out_features // attention.head_dim
            shapes.append((key_heads, attention.head_dim, attention.head_dim))
        self.layout = tuple(shapes)

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        return self.prepare_cache(TextCache(self.layout, self.dtype, self.device), request, beside)

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        text_jobs, canvas_jobs = split_jobs(jobs)
        logits = torch.zeros(0, self.vocab, device=self.device)
        with use_attention(self.config):
            if text_jobs:
                self._run_stack(
                    self.encoder, text_jobs, self.encoder.embed_tokens(self._token_ids(text_jobs))
                )
            if canvas_jobs:
                states = self._run_stack(self.decoder, canvas_jobs, self._canvas_entry(canvas_jobs))
                logits = self._read_logits(states[0, self._row_indices(canvas_jobs)])
        return Computed(logits, {}, "torch", sum(len(job.tokens) for job in jobs))

    def _token_ids(self, jobs: Sequence[Job]) -> torch.Tensor:
        return pack_jobs(jobs, self.device)[0]

    def _run_stack(self, stack: Any, jobs: Sequence[Job], states: torch.Tensor) -> torch.Tensor:
        """Runs the layers of encoder or decoder and the norm after them, -> (1, T, E)."""
        _, positions = pack_jobs(jobs, self.device)
        layer_kinds = self.config.layer_types
        rotations = {
            layer_kind: stack.rotary_emb(states, positions, layer_kind)
            for layer_kind in {*layer_kinds}
        }
        context_token = STEP.set(jobs)
        try:
            for layer, layer_kind in zip(stack.layers, layer_kinds, strict=True):
                output = layer(
                    states, position_embeddings=rotations[layer_kind], position_ids=positions
                )
                states = output[0] if isinstance(output, tuple) else output
        finally:
            STEP.reset(context_token)
        return stack.norm(states)  # type: ignore[no-any-return]

    def _canvas_entry(self, jobs: Sequence[BehindText]) -> torch.Tensor:
        """The embeddings of canvases with what was said of them before, (1, T, E)."""
        embedding = self.decoder.embed_tokens
        states = embedding(self._token_ids(jobs))
        soft_embeddings = torch.zeros_like(states)
        first_node = 0
        for job in jobs:
            end_node = first_node + len(job.tokens)
            if job.said is not None:
                previous_logits = job.said.to(embedding.weight)  # rounded, as transformers keeps it
                token_probs = previous_logits.softmax(-1, dtype=torch.float32).to(embedding.weight)
                soft_embeddings[0, first_node:end_node] = (
                    token_probs @ embedding.weight * embedding.embed_scale.to(states)
                )
            first_node = end_node
        mixed: torch.Tensor = self.decoder.self_conditioning(states, soft_embeddings)
        return mixed

    @staticmethod
    def _row_indices(jobs: Sequence[Job]) -> list[int]:
        row_indices = []
        first_node = 0
        for job in jobs:
            row_indices += [first_node + row for row in job.rows]
            first_node += len(job.tokens)
        return row_indices

    def _read_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Rows of logits (n, V) of normed states (n, E)."""
        logits: torch.Tensor = self.hf.lm_head(states).float()
        logit_cap = self.config.final_logit_softcapping
        return logits if logit_cap is None else (logits / logit_cap).tanh() * logit_cap
