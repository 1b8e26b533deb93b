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
from foretell.errors import BadModel, Unsupported, first_line
from foretell.models.decoder.learning import copied
from foretell.models.decoder.loop import StockBlock, attending
from foretell.ops.files import whole, write_text
from foretell.ops.fingerprint import norm_mark
from foretell.ops.parsing import json_of

SCHEMA = "foretell.compressor/1"
WEIGHTS = "model.safetensors"
MAKE = "make one with `foretell train compressor`"
ATTENTION = "foretell-compressor"


@dataclass(frozen=True)
class Seen:
    """Who sees whom in the layer that runs.

    `first`: tokens whose keys are seen, which precede pooled queries; 0: there are none of these.
    """

    causal: bool
    first: int = 0


SEEN: ContextVar[Seen] = ContextVar("foretell_compressor_seen")


def _attend(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """q (B, H, n, D), k and v (B, KV, n, D) -> (B, n, H, D)."""
    for name in ("sliding_window", "softcap", "s_aux"):
        if more.get(name) is not None:
            raise LookupError(f"its layers attend with {name}")
    seen = SEEN.get()
    first = seen.first
    if first:
        q, k, v = q[:, :, first:], k[:, :, :first], v[:, :, :first]
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=seen.causal, scale=scaling, enable_gqa=grouped
    ).transpose(1, 2)
    return F.pad(out, (0, 0, 0, 0, first, 0)), None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


@dataclass(frozen=True)
class CompressorShape:
    """What a compressor is built by. `body`: the configuration of its layers, as transformers has
    it; `width`: numbers between the two matrices behind them.
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
    def longest(self) -> int:
        """Tokens that can be encoded together."""
        return int(getattr(self.body.config, "max_position_embeddings", None) or 1 << 20)

    def check(self, name: str, size: int) -> str:
        """What is wrong with a context of so many tokens; empty: nothing."""
        if not self.shape.window and size > self.longest:
            return f"it has {size:,} tokens, and {name} encodes {self.longest:,} at once; cut it"
        return ""

    def places(self, n: int) -> torch.Tensor:
        """Of each of n tokens the row (n,) that stands for it."""
        raise NotImplementedError

    def count(self, n: int) -> int:
        """Rows m that a context of n tokens becomes."""
        raise NotImplementedError

    def rows(self, tokens: Sequence[int]) -> torch.Tensor:
        """The rows (m, E) of a context."""
        weight = self.body.get_input_embeddings().weight
        rows: torch.Tensor = self(torch.tensor([[*tokens]], device=weight.device))[0]
        return rows

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.body.get_input_embeddings()(ids)
        return h if self.shape.scale == 1 else h * self.shape.scale

    def through(
        self, h: torch.Tensor, layers: Sequence[nn.Module], positions: torch.Tensor, seen: Seen
    ) -> torch.Tensor:
        """States (B, n, d) through these layers, at positions (n,)."""
        rotary = self.body.rotary_emb(h, positions[None])
        token = SEEN.set(seen)
        try:
            with attending(self.body.config, ATTENTION):
                for layer in layers:
                    h = StockBlock(layer)(h, rotary, positions[None])
        finally:
            SEEN.reset(token)
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
            self.go_on = nn.Parameter(torch.zeros(shape.hidden))  # <Cont>, behind each context
            self.repeat = nn.Parameter(torch.zeros(shape.hidden))  # <Rec>, in training only

    def count(self, n: int) -> int:
        return math.ceil(n / self.shape.ratio) + self.shape.marks

    def places(self, n: int) -> torch.Tensor:
        return groups(n, self.shape.ratio)

    def pooled(self, h: torch.Tensor) -> torch.Tensor:
        """The means (B, m, d) of the groups of states (B, n, d)."""
        return means(h, self.places(h.shape[1]).to(h.device))

    def encoded(self, ids: torch.Tensor) -> torch.Tensor:
        """What leaves the last layer, (B, m, d)."""
        h = self.embedded(ids)
        n = h.shape[1]
        layers = self.body.layers
        here = torch.arange(n, device=h.device)
        h = self.through(h, layers[:-1], here, Seen(causal=False))
        pooled = self.pooled(h)
        if not len(layers):
            return pooled
        asks = torch.arange(pooled.shape[1], device=h.device)
        both = torch.cat([h, pooled], 1)
        seen = Seen(causal=False, first=n)
        return self.through(both, layers[-1:], torch.cat([here, asks]), seen)[:, n:]

    def forward(self, ids: torch.Tensor, repeat: bool = False) -> torch.Tensor:
        """Token ids (B, n) -> rows (B, m, E), with the mark for what follows: the text behind the
        context, or `repeat`, the context itself.
        """
        rows: torch.Tensor = self.wide(self.narrow(self.encoded(ids)))
        if not self.shape.marks:
            return rows
        mark = self.repeat if repeat else self.go_on
        return torch.cat([rows, mark.to(rows).expand(len(rows), 1, -1)], 1)


def means(h: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Of states (B, n, d) the means (B, m, d) of those with the same place (n,), from 0 on."""
    m = int(places[-1]) + 1
    sums = h.new_zeros(h.shape[0], m, h.shape[2]).index_add(1, places, h)
    return sums / places.bincount(minlength=m).to(h)[:, None]


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

    def count(self, n: int) -> int:
        whole, rest = divmod(n, self.shape.window)
        each = self.shape.window // self.shape.ratio
        return whole * each + math.ceil(rest / self.shape.ratio) + 2 * self.shape.marks

    def places(self, n: int) -> torch.Tensor:
        return runs(n, self.shape.ratio, self.shape.window) + int(self.shape.marks)

    def latents(self, ids: torch.Tensor) -> torch.Tensor:
        """The means (B, m, d) of windows (B, n) of one length."""
        h = self.embedded(ids)
        n = h.shape[1]
        here = torch.arange(n, device=h.device)
        h = self.body.norm(self.through(h, self.body.layers, here, Seen(causal=True)))
        return means(h, (here // self.shape.ratio))

    def forward(self, ids: torch.Tensor, repeat: bool = False) -> torch.Tensor:
        """Token ids (B, n) -> rows (B, m, E), between two marks."""
        size = self.shape.window
        whole = ids.shape[1] // size * size
        parts = []
        if whole:
            windows = self.latents(ids[:, :whole].reshape(-1, size))
            parts.append(windows.reshape(len(ids), -1, windows.shape[-1]))
        if whole < ids.shape[1]:
            parts.append(self.latents(ids[:, whole:]))
        h = torch.cat(parts, 1)
        rows: torch.Tensor = self.second(F.gelu(self.first(self.norm(h))))
        if not self.shape.marks:
            return rows
        marks = [mark.to(rows).expand(len(rows), 1, -1) for mark in (self.start, self.end)]
        return torch.cat([marks[0], rows, marks[1]], 1)


KINDS: dict[str, type[Compressor]] = {made.kind: made for made in (ArcEncoder, Lclm)}
KNOWN: WeakKeyDictionary[Any, dict[Any, Compressor]] = WeakKeyDictionary()


# --- folders


def body_of(config: dict[str, Any]) -> Any:
    """A decoder without head, whose weights are of no meaning yet: on no device, for `assign`.

    Raises LookupError, TypeError or ValueError for what transformers does not know.
    """
    made = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    with torch.device("meta"):
        body: Any = AutoModelForCausalLM.from_config(made).get_decoder()
    body.rotary_emb = type(body.rotary_emb)(config=body.config)
    return body


def body_from(target: Any, layers: int) -> tuple[Any, dict[str, Any]]:
    """A copy of a decoder's embedding and first layers, in float32, and its configuration.

    Raises Unsupported for a family whose layers cannot be run like this.
    """
    hf = copied(target).requires_grad_(False)
    body = hf.get_decoder()
    need = ""
    if "layer_type" in inspect.signature(body.rotary_emb.forward).parameters:
        need = "one rotation for all layers"
    elif body.get_input_embeddings() is not hf.get_input_embeddings():
        need = "an embedding of the usual kind"
    if need:
        raise Unsupported.missing("a compressor", target.name, need, "use another model")
    body.layers = body.layers[:layers]
    config = body.config
    config.num_hidden_layers = layers
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = kinds[:layers]
    return body, json.loads(config.to_json_string(use_diff=False))


def save(compressor: Compressor, folder: Path, target: Any, about: dict[str, Any]) -> None:
    """Writes the folder; `about`: what else its configuration is to say. Raises BadFile."""
    from safetensors.torch import save_file

    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in compressor.state_dict().items()
    }
    config = {
        "schema": SCHEMA,
        **asdict(compressor.shape),
        "norm": norm_mark(target),
        **about,
    }
    with whole(folder / WEIGHTS) as part:
        save_file(tensors, part)
    write_text(folder / "config.json", json.dumps(config, indent=1))


def groups(n: int, ratio: int) -> torch.Tensor:
    """Of each of n tokens its group (n,): ceil(n / ratio) groups that are as even as can be, the
    larger ones first.
    """
    count = math.ceil(n / ratio)
    sizes = torch.full((count,), n // max(1, count))
    sizes[: n % max(1, count)] += 1
    return torch.arange(count).repeat_interleave(sizes)


def runs(n: int, ratio: int, window: int) -> torch.Tensor:
    """The same of groups of `ratio` tokens each, in windows: the last one of a window may have
    less.
    """
    place = torch.arange(n)
    each = math.ceil(window / ratio)
    return place // window * each + place % window // ratio


def compressor_of(target: Any, method: str, kind: str, folder: str) -> Compressor:
    """The compressor of a folder, for this target; loaded once. Raises BadModel, Unsupported."""
    target_shape(target, method)
    if not folder:
        need = "a trained compressor, and none ships for it"
        cure = f"give {kind}:folder=FOLDER; `foretell train compressor --kind {kind}` makes one"
        raise Unsupported.missing(method, target.name, need, cure)
    path = Path(folder)
    config = read_config(path)
    try:
        stamp = [(path / name).stat().st_mtime_ns for name in (WEIGHTS, "config.json")]
    except OSError as error:
        raise BadModel(f"{path / WEIGHTS}: cannot be read ({error.strerror}); {MAKE}") from error
    key = kind, str(path.resolve()), *stamp
    known = KNOWN.setdefault(target, {})
    if key not in known:
        known[key] = load(path, config, target, kind)
    return known[key]


def read_config(folder: Path) -> dict[str, Any]:
    """Raises BadModel."""
    path = folder / "config.json"
    try:
        config = json_of(path.read_text("utf-8"))
        schema = config.get("schema")
    except (OSError, ValueError, AttributeError) as error:
        raise BadModel(f"{path}: is no compressor's ({first_line(error)}); {MAKE}") from error
    if schema != SCHEMA:
        raise BadModel(f"{path}: is of schema {schema!r}, not {SCHEMA}; {MAKE}")
    return dict(config)


def load(folder: Path, config: dict[str, Any], target: Any, kind: str) -> Compressor:
    """The compressor that a configuration describes. Raises BadModel."""
    from foretell.drafters.heads.networks.folder import read_tensors

    path = folder / "config.json"
    found = config.get("kind")
    if found != kind:
        raise BadModel(f"{folder}: is a compressor for kv={found}, not for kv={kind}")
    check_target(folder, config, target)
    try:
        shape = CompressorShape(
            **{part.name: config[part.name] for part in fields(CompressorShape)}
        )
        if shape.ratio < 1 or shape.window % shape.ratio or (kind == "lclm" and not shape.window):
            raise ValueError("a window is a multiple of the ratio")
        body = body_of(shape.body)
        with torch.device("meta"):
            compressor = KINDS[kind](shape, body)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadModel(f"{path}: is damaged ({first_line(error)}); {MAKE}") from error
    tensors = read_tensors(folder / WEIGHTS)
    own = compressor.state_dict()
    missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which {kind} has not"
        raise BadModel(f"{folder / WEIGHTS}: {what}; it does not belong to its config.json")
    for name, value in tensors.items():
        if value.shape != own[name].shape or not value.isfinite().all():
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
