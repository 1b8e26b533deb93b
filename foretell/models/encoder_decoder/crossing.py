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


def _attend_source(
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
    layer_index: Any = module.layer_idx
    if k is ELSEWHERE:
        output = source_attention(layer_index, q[0], scaling, softcap)
    else:
        attention_terms = (scaling, sliding_window, softcap, None, position_bias)
        output = forest_attention(layer_index, q[0], k[0], v[0], *attention_terms)
    return output[None], None


def _record_source(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Keeps the keys and values of the source; attends to nothing."""
    source_length, layers = RECORDED.get()
    if k.shape[2] == source_length:
        layers.append((k[0].contiguous(), v[0].contiguous()))
    return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[-1]), None


AttentionInterface.register("foretell-source", _attend_source)
AttentionInterface.register("foretell-source-rows", _record_source)


class RelativeBias:
    """T5's bias by the distance of two positions: (n,), (rows,) -> (heads, n, rows)."""

    def __init__(self, attention: Any):
        self.attention = attention

    def __call__(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        attention = self.attention
        buckets = attention._relative_position_bucket(
            key_positions[None, :] - query_positions[:, None],
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

    def __init__(self, hf_model: PreTrainedModel):
        body: Any = hf_model.get_decoder()
        self.config = body.config
        self.embed: Any = body.embed_tokens
        self.places: Any = getattr(body, "embed_positions", None)
        self.entry_norm: Any = getattr(body, "layernorm_embedding", None)
        self.rotary: Any = getattr(body, "rotary_emb", None)
        self.layers = _find_part(body, LAYERS)
        self.norm = _find_part(body, NORMS)
        self.head: Any = hf_model.get_output_embeddings()
        if not self.layers or self.head is None:
            raise LookupError("its parts are not those of the usual skeleton")
        self.added: Any = getattr(hf_model, "final_logits_bias", None)
        self.cap = getattr(self.config, "final_logit_softcapping", None)
        is_scaled = getattr(self.config, "scale_decoder_outputs", False)
        self.factor = self.config.d_model**-0.5 if is_scaled else 1.0
        self.banned = _banned_tokens(hf_model)
        self.scale = 1.0  # between the embedding and what enters layer 0
        bias_module: Any = next(
            (
                module
                for module in self.layers[0].modules()
                if hasattr(module, "relative_attention_bias")
            ),
            None,
        )
        self.bias = None if bias_module is None else RelativeBias(bias_module)
        # transformers 5.24 began to rename it.
        parameters = inspect.signature(self.layers[0].forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"

    def measure_scale(self, entering_states: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Finds the embedding's scale by what enters layer 0 for `token_ids` (1, T), (1, T, E)."""
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
        likely_scales = [1.0, entering_states.shape[-1] ** 0.5]
        distances = []
        for self.scale in likely_scales:
            distances.append(
                float((self.embedded(token_ids, positions) - entering_states).abs().max())
            )
        self.scale = likely_scales[distances.index(min(distances))]

    def embedded(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """States (1, T, E) that enter layer 0 for ids and positions (1, T)."""
        states: torch.Tensor = self.embed(token_ids)
        if self.scale != 1:
            states = states * torch.tensor(self.scale, dtype=states.dtype)
        if self.places is not None:
            states = states + self.places(token_ids, position_ids=positions[0])
        normed: torch.Tensor = states if self.entry_norm is None else self.entry_norm(states)
        return normed

    def run(
        self,
        states: torch.Tensor,
        positions: torch.Tensor,
        layers: Sequence[int],
        taps: Sequence[int] = (),
        tapped_states: dict[int, torch.Tensor] | None = None,
        source: torch.Tensor = ELSEWHERE,
    ) -> torch.Tensor:
        """Runs states (1, T, E) through `layers`, in order -> (1, T, E); taps as of Loop.run.

        `source`: an encoder's states (1, S, E); ELSEWHERE: each job's source is encoded already.
        """
        tapped_states = {} if tapped_states is None else tapped_states
        layer_inputs: dict[str, Any] = {}
        if self.rotary is not None:
            layer_inputs = {
                "position_embeddings": self.rotary(states, positions),
                "position_ids": positions,
            }
        if self.bias is not None:
            layer_inputs = {"position_bias": self.bias, "encoder_decoder_position_bias": ELSEWHERE}
        if source is ELSEWHERE:
            layer_inputs[self.cache_name] = BRIDGE
        for layer in layers:
            for tap in taps:
                if tap <= layer and tap not in tapped_states:
                    tapped_states[tap] = states[0]
            output = self.layers[layer](
                states, attention_mask=None, encoder_hidden_states=source, **layer_inputs
            )
            states = output[0] if isinstance(output, tuple) else output
        for tap in taps:
            if tap not in tapped_states:
                tapped_states[tap] = states[0]
        return states

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows (n, V) of states (n, E) that left the last layer."""
        states = hidden_states if self.norm is None else self.norm(hidden_states)
        if self.factor != 1:
            states = states * self.factor
        logits: torch.Tensor = self.head(states)
        if self.added is not None:
            logits = logits + self.added
        if self.cap:
            logits = self.cap * torch.tanh(logits / self.cap)
        if self.banned:
            logits[:, self.banned] = -torch.inf
        return logits


def _find_part(body: Any, part_names: Sequence[str]) -> Any:
    """The first of these attributes that there is; None: it has none of them."""
    return next(
        (getattr(body, part_name) for part_name in part_names if hasattr(body, part_name)), None
    )


def _banned_tokens(hf_model: PreTrainedModel) -> list[int]:
    """Token ids that the model's own settings never let it say, as Marian's do with padding.

    Raises LookupError for whole words of several tokens.
    """
    settings: Any = hf_model.generation_config
    banned_words = [list(word) for word in getattr(settings, "bad_words_ids", None) or ()]
    if any(len(word) != 1 for word in banned_words):
        raise LookupError("its generation settings forbid sequences of several tokens")
    banned_tokens = {word[0] for word in banned_words} | {
        *(getattr(settings, "suppress_tokens", None) or ())
    }
    return sorted(banned_tokens)
