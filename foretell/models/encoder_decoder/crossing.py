"""The decoder of an encoder-decoder taken apart, and how its layers see a source.

Its layers are called one by one, as Loop calls those of other decoders. In the place of
transformers' cache they are given one that says that the source's rows are there; attention, which
is ours, knows where.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, EncoderDecoderCache, PreTrainedModel

from foretell.core.model import forest_attention
from foretell.models.encoder_decoder.source import Layers, source_attention

LAYERS = ("layers", "block")  # names of the decoder's list of layers
NORMS = ("final_layer_norm", "layer_norm", "norm")  # and of the norm before the head
ELSEWHERE = torch.empty(1, 1, 0, 1)  # handed to attention in the place of a source's keys


# --- what takes the place of transformers' cache


class _Through:
    """Stands for the rows of the text, which are foretell's: hands on what it is given."""

    def update(
        self, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return k, v

    def get_seq_length(self, *_: Any) -> int:
        return 0


class _Elsewhere:
    """Stands for the rows of the source: says that they are there, and names them ELSEWHERE."""

    keys = values = ELSEWHERE

    @property
    def layers(self) -> _Elsewhere:
        return self

    def __getitem__(self, layer: int) -> _Elsewhere:
        return self

    def get(self, layer: int) -> bool:
        return True


class _Bridge(EncoderDecoderCache):
    def __init__(self) -> None:
        self.self_attention_cache: Any = _Through()
        self.cross_attention_cache: Any = _Elsewhere()
        self.is_updated: Any = _Elsewhere()


BRIDGE = _Bridge()
RECORDED: ContextVar[tuple[int, Layers]] = ContextVar("foretell_source_rows")


def _attend(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    layer: Any = module.layer_idx
    if k is ELSEWHERE:
        out = source_attention(layer, q[0], scaling, softcap)
    else:
        terms = (scaling, sliding_window, softcap, None, position_bias)
        out = forest_attention(layer, q[0], k[0], v[0], *terms)
    return out[None], None


def _record(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Keeps the keys and values of the source; attends to nothing."""
    count, layers = RECORDED.get()
    if k.shape[2] == count:
        layers.append((k[0].contiguous(), v[0].contiguous()))
    return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[-1]), None


AttentionInterface.register("foretell-source", _attend)
AttentionInterface.register("foretell-source-rows", _record)


class RelativeBias:
    """T5's bias by the distance of two positions: (n,), (rows,) -> (heads, n, rows)."""

    def __init__(self, attention: Any):
        self.attention = attention

    def __call__(self, here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        attention = self.attention
        buckets = attention._relative_position_bucket(
            there[None, :] - here[:, None],
            bidirectional=False,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        bias: torch.Tensor = attention.relative_attention_bias(buckets)
        return bias.permute(2, 0, 1)


class DecoderParts:
    """The usual skeleton of such a decoder: embedding, positions, layers, norm, head.

    Raises LookupError where it is another.
    """

    def __init__(self, hf: PreTrainedModel):
        body: Any = hf.get_decoder()
        self.config = body.config
        self.embed: Any = body.embed_tokens
        self.places: Any = getattr(body, "embed_positions", None)
        self.entry_norm: Any = getattr(body, "layernorm_embedding", None)
        self.rotary: Any = getattr(body, "rotary_emb", None)
        self.layers = _part(body, LAYERS)
        self.norm = _part(body, NORMS)
        self.head: Any = hf.get_output_embeddings()
        if not self.layers or self.head is None:
            raise LookupError("its parts are not those of the usual skeleton")
        self.added: Any = getattr(hf, "final_logits_bias", None)
        self.cap = getattr(self.config, "final_logit_softcapping", None)
        scaled = getattr(self.config, "scale_decoder_outputs", False)
        self.factor = self.config.d_model**-0.5 if scaled else 1.0
        self.banned = _banned(hf)
        self.scale = 1.0  # between the embedding and what enters layer 0
        first: Any = next(
            (m for m in self.layers[0].modules() if hasattr(m, "relative_attention_bias")), None
        )
        self.bias = None if first is None else RelativeBias(first)
        # transformers 5.24 began to rename it.
        parameters = inspect.signature(self.layers[0].forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"

    def measure_scale(self, entering: torch.Tensor, ids: torch.Tensor) -> None:
        """Finds the embedding's scale by what enters layer 0 for `ids` (1, T), (1, T, E)."""
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        likely = [1.0, entering.shape[-1] ** 0.5]
        distances = []
        for self.scale in likely:
            distances.append(float((self.embedded(ids, positions) - entering).abs().max()))
        self.scale = likely[distances.index(min(distances))]

    def embedded(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What enters layer 0 for ids and positions (1, T): (1, T, E)."""
        h: torch.Tensor = self.embed(ids)
        if self.scale != 1:
            h = h * torch.tensor(self.scale, dtype=h.dtype)
        if self.places is not None:
            h = h + self.places(ids, position_ids=positions[0])
        return h if self.entry_norm is None else self.entry_norm(h)  # type: ignore[no-any-return]

    def run(
        self,
        h: torch.Tensor,
        positions: torch.Tensor,
        layers: Sequence[int],
        taps: Sequence[int] = (),
        hidden: dict[int, torch.Tensor] | None = None,
        source: torch.Tensor = ELSEWHERE,
    ) -> torch.Tensor:
        """h (1, T, E) through `layers`, in order -> (1, T, E); taps as of Loop.run.

        `source`: an encoder's states (1, S, E); ELSEWHERE: each job's source is encoded already.
        """
        hidden = {} if hidden is None else hidden
        more: dict[str, Any] = {}
        if self.rotary is not None:
            more = {"position_embeddings": self.rotary(h, positions), "position_ids": positions}
        if self.bias is not None:
            more = {"position_bias": self.bias, "encoder_decoder_position_bias": ELSEWHERE}
        if source is ELSEWHERE:
            more[self.cache_name] = BRIDGE
        for i in layers:
            for tap in taps:
                if tap <= i and tap not in hidden:
                    hidden[tap] = h[0]
            out = self.layers[i](h, attention_mask=None, encoder_hidden_states=source, **more)
            h = out[0] if isinstance(out, tuple) else out
        for tap in taps:
            if tap not in hidden:
                hidden[tap] = h[0]
        return h

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """Rows (n, V) of what left the last layer, (n, E)."""
        states = h if self.norm is None else self.norm(h)
        if self.factor != 1:
            states = states * self.factor
        rows: torch.Tensor = self.head(states)
        if self.added is not None:
            rows = rows + self.added
        if self.cap:
            rows = self.cap * torch.tanh(rows / self.cap)
        if self.banned:
            rows[:, self.banned] = -torch.inf
        return rows


def _part(body: Any, names: Sequence[str]) -> Any:
    """The first of these attributes that there is; None: it has none of them."""
    return next((getattr(body, name) for name in names if hasattr(body, name)), None)


def _banned(hf: PreTrainedModel) -> list[int]:
    """Ids that the model's own settings never let it say, as Marian's do with padding.

    Raises LookupError for whole words of several tokens.
    """
    settings: Any = hf.generation_config
    words = [list(word) for word in getattr(settings, "bad_words_ids", None) or ()]
    if any(len(word) != 1 for word in words):
        raise LookupError("its generation settings forbid sequences of several tokens")
    alone = {word[0] for word in words} | {*(getattr(settings, "suppress_tokens", None) or ())}
    return sorted(alone)
