"""Encoders that make of a context a few rows, which a decoder reads in place of its tokens.

The body is a transformers decoder without its head, usually the first layers of the target itself.

    n  tokens of a context    m  rows that stand for them    E  width of what enters the decoder

A folder has `config.json` and `model.safetensors`. Its rows are what answers are made of, so a
folder that was made for other weights is refused.

Sources: Pilchen et al., "ARC-Encoder: learning compressed text representations for large language
models" (arXiv 2510.20535); LCLM, github.com/LeonLixyz/LCLM.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
)

from foretell.drafters.heads.networks.folder import target_shape
from foretell.errors import BadModel, Unsupported, first_message_line
from foretell.models.decoder.learning import copy_modules
from foretell.models.decoder.loop import StockBlock, use_attention
from foretell.ops.files import replace_file, write_text
from foretell.ops.fingerprint import norm_mark
from foretell.ops.parsing import parse_json

SCHEMA = "foretell.compressor/1"
WEIGHTS = "model.safetensors"
MAKE = "make one with `foretell train compressor`"
ATTENTION = "foretell-compressor"


@dataclass(frozen=True)
class Seen:
    """Visibility among tokens in the layer that runs.

    `key_count`: tokens whose keys are seen, which precede pooled queries; 0: there are none of
    these.
    """

    causal: bool
    key_count: int = 0


SEEN: ContextVar[Seen] = ContextVar("foretell_compressor_seen")


def _attend(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """q (B, H, n, D), k and v (B, KV, n, D) -> (B, n, H, D)."""
    for name in ("sliding_window", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise LookupError(f"its layers attend with {name}")
    visibility = SEEN.get()
    key_count = visibility.key_count
    if key_count:
        q, k, v = q[:, :, key_count:], k[:, :, :key_count], v[:, :, :key_count]
    shares_keys = q.shape[1] != k.shape[1]
    query_outputs = F.scaled_dot_product_attention(
        q, k, v, is_causal=visibility.causal, scale=scaling, enable_gqa=shares_keys
    ).transpose(1, 2)
    return F.pad(query_outputs, (0, 0, 0, 0, key_count, 0)), None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


@dataclass(frozen=True)
class CompressorShape:
    """The sizes that a compressor is built by. `body`: the configuration of its layers, as
    transformers has it; `width`: numbers between the two matrices after them.
    """

    kind: str
    ratio: int  # tokens that one row stands for
    hidden: int  # E
    width: int
    window: int = 0  # tokens that are encoded together; 0: all of a context
    scale: float = 1.0  # of the embedding that enters the body
    marks: bool = True  # whether there are learned rows beside those of the tokens
    body: dict[str, Any] = field(default_factory=dict)


class Compressor(nn.Module):
    """The base of both kinds. `body` is a decoder without head, see `body_of`."""

    kind: ClassVar[str]

    def __init__(self, shape: CompressorShape, body: Any):
        super().__init__()
        self.shape = shape
        self.body = body
        self.hidden = shape.hidden

    @property
    def max_tokens(self) -> int:
        """Tokens that can be encoded together."""
        return int(getattr(self.body.config, "max_position_embeddings", None) or 1 << 20)

    def check_size(self, policy_name: str, token_count: int) -> str:
        """Says what is wrong with a context of so many tokens; empty: nothing."""
        if not self.shape.window and token_count > self.max_tokens:
            return (
                f"it has {token_count:,} tokens, and {policy_name} encodes {self.max_tokens:,} "
                "at once; cut it"
            )
        return ""

    def row_places(self, n: int) -> torch.Tensor:
        """The row (n,) that stands for each of n tokens."""
        raise NotImplementedError

    def row_count(self, n: int) -> int:
        """Rows m that a context of n tokens becomes."""
        raise NotImplementedError

    def encode_rows(self, tokens: Sequence[int]) -> torch.Tensor:
        """The rows (m, E) of a context."""
        embedding_weight = self.body.get_input_embeddings().weight
        rows: torch.Tensor = self(torch.tensor([[*tokens]], device=embedding_weight.device))[0]
        return rows

    def embed_ids(self, ids: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.body.get_input_embeddings()(ids)
        return h if self.shape.scale == 1 else h * self.shape.scale

    def run_layers(
        self,
        h: torch.Tensor,
        layers: Sequence[nn.Module],
        positions: torch.Tensor,
        visibility: Seen,
    ) -> torch.Tensor:
        """States (B, n, d) through these layers, at positions (n,)."""
        rotary = self.body.rotary_emb(h, positions[None])
        context_token = SEEN.set(visibility)
        try:
            with use_attention(self.body.config, ATTENTION):
                for layer in layers:
                    h = StockBlock(layer)(h, rotary, positions[None])
        finally:
            SEEN.reset(context_token)
        return h


class ArcEncoder(Compressor):
    """Every token sees all others. Before the last layer the states of `ratio` tokens each are
    averaged: the mean is what asks and what the layer adds to, at positions from 0 on, while keys
    and values are those of all tokens.
    """

    kind = "arc-encoder"

    def __init__(self, shape: CompressorShape, body: Any):
        super().__init__(shape, body)
        d = int(body.config.hidden_size)
        body.norm = nn.Identity()  # states are taken in front of it
        self.narrow = nn.Linear(d, shape.width, bias=False)
        self.wide = nn.Linear(shape.width, shape.hidden, bias=False)
        if shape.marks:
            self.go_on = nn.Parameter(torch.zeros(shape.hidden))  # <Cont>, after each context
            self.repeat = nn.Parameter(torch.zeros(shape.hidden))  # <Rec>, in training only

    def row_count(self, n: int) -> int:
        return math.ceil(n / self.shape.ratio) + self.shape.marks

    def row_places(self, n: int) -> torch.Tensor:
        return even_groups(n, self.shape.ratio)

    def pool_states(self, h: torch.Tensor) -> torch.Tensor:
        """The means (B, m, d) of the groups of states (B, n, d)."""
        return average_groups(h, self.row_places(h.shape[1]).to(h.device))

    def encode_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """States (B, m, d) that leave the last layer."""
        h = self.embed_ids(ids)
        n = h.shape[1]
        layers = self.body.layers
        token_positions = torch.arange(n, device=h.device)
        h = self.run_layers(h, layers[:-1], token_positions, Seen(causal=False))
        pooled_states = self.pool_states(h)
        if not len(layers):
            return pooled_states
        query_positions = torch.arange(pooled_states.shape[1], device=h.device)
        joined_states = torch.cat([h, pooled_states], 1)
        visibility = Seen(causal=False, key_count=n)
        return self.run_layers(
            joined_states, layers[-1:], torch.cat([token_positions, query_positions]), visibility
        )[:, n:]

    def forward(self, ids: torch.Tensor, repeat: bool = False) -> torch.Tensor:
        """Token ids (B, n) -> rows (B, m, E), with the mark for what follows: the text after the
        context, or `repeat`, the context itself.
        """
        rows: torch.Tensor = self.wide(self.narrow(self.encode_ids(ids)))
        if not self.shape.marks:
            return rows
        mark_row = self.repeat if repeat else self.go_on
        return torch.cat([rows, mark_row.to(rows).expand(len(rows), 1, -1)], 1)


def average_groups(h: torch.Tensor, group_indices: torch.Tensor) -> torch.Tensor:
    """Means (B, m, d) of the states (B, n, d) of each group, by the tokens' `group_indices` (n,),
    from 0 on.
    """
    group_count = int(group_indices[-1]) + 1
    group_sums = h.new_zeros(h.shape[0], group_count, h.shape[2]).index_add(1, group_indices, h)
    return group_sums / group_indices.bincount(minlength=group_count).to(h)[:, None]


class Lclm(Compressor):
    """Windows are encoded by themselves, each from position 0 on, and a token sees those before it
    in its window. The normed states that leave the body are averaged, `ratio` of them each, and an
    adapter of two layers makes rows of the means.
    """

    kind = "lclm"

    def __init__(self, shape: CompressorShape, body: Any):
        super().__init__(shape, body)
        d = int(body.config.hidden_size)
        self.norm = nn.RMSNorm(d, eps=1e-6)
        self.first = nn.Linear(d, shape.hidden)
        self.second = nn.Linear(shape.hidden, shape.hidden)
        if shape.marks:
            self.start = nn.Parameter(torch.zeros(shape.hidden))  # <|memory_start|>
            self.end = nn.Parameter(torch.zeros(shape.hidden))  # <|memory_end|>

    def row_count(self, n: int) -> int:
        full_windows, rest_tokens = divmod(n, self.shape.window)
        rows_per_window = self.shape.window // self.shape.ratio
        return (
            full_windows * rows_per_window
            + math.ceil(rest_tokens / self.shape.ratio)
            + 2 * self.shape.marks
        )

    def row_places(self, n: int) -> torch.Tensor:
        return window_groups(n, self.shape.ratio, self.shape.window) + int(self.shape.marks)

    def encode_windows(self, ids: torch.Tensor) -> torch.Tensor:
        """The means (B, m, d) of windows (B, n) of one length."""
        h = self.embed_ids(ids)
        n = h.shape[1]
        token_positions = torch.arange(n, device=h.device)
        h = self.body.norm(self.run_layers(h, self.body.layers, token_positions, Seen(causal=True)))
        return average_groups(h, (token_positions // self.shape.ratio))

    def forward(self, ids: torch.Tensor, repeat: bool = False) -> torch.Tensor:
        """Token ids (B, n) -> rows (B, m, E), between two marks."""
        window_size = self.shape.window
        windowed_tokens = ids.shape[1] // window_size * window_size
        mean_parts = []
        if windowed_tokens:
            window_means = self.encode_windows(ids[:, :windowed_tokens].reshape(-1, window_size))
            mean_parts.append(window_means.reshape(len(ids), -1, window_means.shape[-1]))
        if windowed_tokens < ids.shape[1]:
            mean_parts.append(self.encode_windows(ids[:, windowed_tokens:]))
        h = torch.cat(mean_parts, 1)
        rows: torch.Tensor = self.second(F.gelu(self.first(self.norm(h))))
        if not self.shape.marks:
            return rows
        mark_rows = [mark.to(rows).expand(len(rows), 1, -1) for mark in (self.start, self.end)]
        return torch.cat([mark_rows[0], rows, mark_rows[1]], 1)


KINDS: dict[str, type[Compressor]] = {network.kind: network for network in (ArcEncoder, Lclm)}
KNOWN: WeakKeyDictionary[Any, dict[Any, Compressor]] = WeakKeyDictionary()


# --- folders


def body_of(config: dict[str, Any]) -> Any:
    """A decoder without head, whose weights are of no meaning yet: on no device, for `assign`.

    Raises LookupError, TypeError or ValueError for what transformers does not know.
    """
    body_config = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    with torch.device("meta"):
        body: Any = AutoModelForCausalLM.from_config(body_config).get_decoder()
    body.rotary_emb = type(body.rotary_emb)(config=body.config)
    return body


def body_from(target: Any, layers: int) -> tuple[Any, dict[str, Any]]:
    """A copy of a decoder's embedding and first layers, in float32, and its configuration.

    Raises Unsupported for a family whose layers cannot be run like this.
    """
    source_model = copy_modules(target).requires_grad_(False)
    body = source_model.get_decoder()
    missing_need = ""
    rotary = getattr(body, "rotary_emb", None)
    if rotary is None or "layer_type" in inspect.signature(rotary.forward).parameters:
        missing_need = "one rotation for all layers"
    elif body.get_input_embeddings() is not source_model.get_input_embeddings():
        missing_need = "an embedding of the usual kind"
    if missing_need:
        raise Unsupported.missing_capability(
            "train compressor", target.name, missing_need, "use another model"
        )
    body.layers = body.layers[:layers]
    config = body.config
    config.num_hidden_layers = layers
    layer_kinds = getattr(config, "layer_types", None)
    if layer_kinds:
        config.layer_types = layer_kinds[:layers]
    return body, json.loads(config.to_json_string(use_diff=False))


def save_compressor(
    compressor: Compressor, folder: Path, target: Any, metadata: dict[str, Any]
) -> None:
    """Writes the folder; `metadata`: what else its configuration is to say. Raises BadFile."""
    from safetensors.torch import save_file

    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in compressor.state_dict().items()
    }
    config = {"schema": SCHEMA, **asdict(compressor.shape), "norm": norm_mark(target), **metadata}
    with replace_file(folder / WEIGHTS) as partial_path:
        save_file(tensors, partial_path)
    write_text(folder / "config.json", json.dumps(config, indent=1))


def even_groups(n: int, ratio: int) -> torch.Tensor:
    """The group (n,) of each of n tokens: ceil(n / ratio) groups that are as even as can be, the
    larger ones first.
    """
    group_count = math.ceil(n / ratio)
    group_sizes = torch.full((group_count,), n // max(1, group_count))
    group_sizes[: n % max(1, group_count)] += 1
    return torch.arange(group_count).repeat_interleave(group_sizes)


def window_groups(n: int, ratio: int, window: int) -> torch.Tensor:
    """The group (n,) of each of n tokens where groups have `ratio` tokens each within windows: the
    last one of a window may have less.
    """
    token_positions = torch.arange(n)
    groups_per_window = math.ceil(window / ratio)
    return token_positions // window * groups_per_window + token_positions % window // ratio


def compressor_of(target: Any, method: str, kind: str, folder: str) -> Compressor:
    """The compressor of a folder, for this target; loaded once. Raises BadModel, Unsupported."""
    target_shape(target, method)
    if not folder:
        missing_need = "a trained compressor, and none ships for it"
        cure = f"give {kind}:folder=FOLDER; `foretell train compressor --kind {kind}` makes one"
        raise Unsupported.missing_capability(method, target.name, missing_need, cure)
    folder_path = Path(folder)
    config = read_config(folder_path)
    try:
        change_times = [
            (folder_path / name).stat().st_mtime_ns for name in (WEIGHTS, "config.json")
        ]
    except OSError as error:
        raise BadModel(
            f"{folder_path / WEIGHTS}: cannot be read ({error.strerror}); {MAKE}"
        ) from error
    cache_key = kind, str(folder_path.resolve()), *change_times
    known_compressors = KNOWN.setdefault(target, {})
    if cache_key not in known_compressors:
        known_compressors[cache_key] = load_compressor(folder_path, config, target, kind)
    return known_compressors[cache_key]


def read_config(folder: Path) -> dict[str, Any]:
    """Raises BadModel."""
    path = folder / "config.json"
    try:
        config = parse_json(path.read_text("utf-8"))
        schema = config.get("schema")
    except (OSError, ValueError, AttributeError) as error:
        raise BadModel(
            f"{path}: is no compressor's ({first_message_line(error)}); {MAKE}"
        ) from error
    if schema != SCHEMA:
        raise BadModel(f"{path}: is of schema {schema!r}, not {SCHEMA}; {MAKE}")
    return dict(config)


def load_compressor(folder: Path, config: dict[str, Any], target: Any, kind: str) -> Compressor:
    """The compressor that a configuration describes. Raises BadModel."""
    from foretell.drafters.heads.networks.folder import read_tensors

    path = folder / "config.json"
    recorded_kind = config.get("kind")
    if recorded_kind != kind:
        raise BadModel(f"{folder}: is a compressor for kv={recorded_kind}, not for kv={kind}")
    check_target(folder, config, target)
    try:
        shape = CompressorShape(
            **{
                shape_field.name: config[shape_field.name]
                for shape_field in fields(CompressorShape)
            }
        )
        if shape.ratio < 1 or shape.window % shape.ratio or (kind == "lclm" and not shape.window):
            raise ValueError("a window is a multiple of the ratio")
        body = body_of(shape.body)
        with torch.device("meta"):
            compressor = KINDS[kind](shape, body)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadModel(f"{path}: is damaged ({first_message_line(error)}); {MAKE}") from error
    tensors = read_tensors(folder / WEIGHTS)
    expected_tensors = compressor.state_dict()
    missing_names, unknown_names = (
        sorted(expected_tensors.keys() - tensors.keys()),
        sorted(tensors.keys() - expected_tensors.keys()),
    )
    if missing_names or unknown_names:
        mismatch = (
            f"lacks {missing_names[0]}"
            if missing_names
            else f"has {unknown_names[0]}, which {kind} has not"
        )
        raise BadModel(f"{folder / WEIGHTS}: {mismatch}; it does not belong to its config.json")
    for name, value in tensors.items():
        if value.shape != expected_tensors[name].shape or not value.isfinite().all():
            raise BadModel(f"{folder / WEIGHTS}: {name} is damaged; {MAKE}")
    dtype = target.dtype if target.dtype.is_floating_point else torch.float32
    compressor.load_state_dict(tensors, assign=True)
    for weight in compressor.parameters():
        weight.data = weight.data.to(target.device, dtype)
    compressor.body.rotary_emb.to(target.device)  # its frequencies stay in float32
    return compressor.requires_grad_(False).eval()


def check_target(folder: Path, config: dict[str, Any], target: Any) -> None:
    """Raises BadModel for a compressor that was made for another model."""
    hidden = int(target.config.hidden_size)
    if config.get("hidden") != hidden:
        raise BadModel(
            f"{folder}: was made for a model of width {config.get('hidden')}, and {target.name} "
            f"has {hidden}; {MAKE} for it"
        )
    if config.get("norm") != norm_mark(target):
        raise BadModel(
            f"{folder}: was made for other weights than those of {target.name}; {MAKE} for it"
        )
