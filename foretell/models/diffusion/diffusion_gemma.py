"""DiffusionGemma as a Model: canvases of uniform noise behind a text.

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
from foretell.models.decoder.loop import attending
from foretell.models.diffusion.renoised import BehindText, TextCache, packed, parted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretell.cache.cache import Cache
    from foretell.cache.job import Job
    from foretell.core.request import Request

KIND = "diffusion_gemma"  # its model_type


class DiffusionGemma(Model):
    """`canvas_length`: positions of the canvases that it was taught. Raises Unsupported for one
    whose text does not read from left to right.
    """

    caps = frozenset({"canvas", NOISE})
    reads_segments = False

    def __init__(self, hf: PreTrainedModel, name: str = "model"):
        self.hf: Any = hf.eval()
        self.name = name
        self.config = hf.config.get_text_config()
        if self.config.use_bidirectional_attention == "all":
            need = "a text that is read from left to right"
            raise Unsupported.missing("foretell", name, need, "use transformers' own generate")
        self.device, self.dtype = hf.device, hf.dtype
        self.encoder, self.decoder = self.hf.model.encoder.language_model, self.hf.model.decoder
        self.vocab = self.known_ids = int(self.config.vocab_size)
        self.context = context_of(self.config)
        self.canvas_length = int(self.hf.config.canvas_length)
        self.weight_bytes = sum(p.numel() * p.element_size() for p in hf.parameters())
        shapes = []
        for layer in self.encoder.layers:
            part = layer.self_attn
            heads = part.k_proj.out_features // part.head_dim
            shapes.append((heads, part.head_dim, part.head_dim))
        self.layout = tuple(shapes)

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        return self.prepared(TextCache(self.layout, self.dtype, self.device), request, beside)

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        texts, canvases = parted(jobs)
        logits = torch.zeros(0, self.vocab, device=self.device)
        with attending(self.config):
            if texts:
                self._through(self.encoder, texts, self.encoder.embed_tokens(self._ids(texts)))
            if canvases:
                h = self._through(self.decoder, canvases, self._entering(canvases))
                logits = self._read(h[0, self._rows(canvases)])
        return Computed(logits, {}, "torch", sum(len(job.tokens) for job in jobs))

    def _ids(self, jobs: Sequence[Job]) -> torch.Tensor:
        return packed(jobs, self.device)[0]

    def _through(self, stack: Any, jobs: Sequence[Job], h: torch.Tensor) -> torch.Tensor:
        """What leaves the norm behind the layers of encoder or decoder, (1, T, E)."""
        _, places = packed(jobs, self.device)
        kinds = self.config.layer_types
        turns = {kind: stack.rotary_emb(h, places, kind) for kind in {*kinds}}
        before = STEP.set(jobs)
        try:
            for layer, kind in zip(stack.layers, kinds, strict=True):
                out = layer(h, position_embeddings=turns[kind], position_ids=places)
                h = out[0] if isinstance(out, tuple) else out
        finally:
            STEP.reset(before)
        return stack.norm(h)  # type: ignore[no-any-return]

    def _entering(self, jobs: Sequence[BehindText]) -> torch.Tensor:
        """The embeddings of canvases with what was said of them before, (1, T, E)."""
        table = self.decoder.embed_tokens
        h = table(self._ids(jobs))
        soft = torch.zeros_like(h)
        start = 0
        for job in jobs:
            end = start + len(job.tokens)
            if job.said is not None:
                said = job.said.to(table.weight)  # rounded, as transformers keeps it
                law = said.softmax(-1, dtype=torch.float32).to(table.weight)
                soft[0, start:end] = law @ table.weight * table.embed_scale.to(h)
            start = end
        return self.decoder.self_conditioning(h, soft)  # type: ignore[no-any-return]

    @staticmethod
    def _rows(jobs: Sequence[Job]) -> list[int]:
        rows = []
        start = 0
        for job in jobs:
            rows += [start + row for row in job.rows]
            start += len(job.tokens)
        return rows

    def _read(self, h: torch.Tensor) -> torch.Tensor:
        """Rows of logits (n, V) of normed states (n, E)."""
        logits: torch.Tensor = self.hf.lm_head(h).float()
        cap = self.config.final_logit_softcapping
        return logits if cap is None else (logits / cap).tanh() * cap
