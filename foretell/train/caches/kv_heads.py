"""Makes of a model one that caches fewer key heads: `foretell train kv-heads`.

Neighbouring key heads become one. On texts the model's rotated keys and values are read as caches
hold them, and each group of heads is projected on the directions along which it varies most
(models/decoder/head_merging.py). Values have the projection in their matrices; that of keys follows
the rotation, in models/decoder/projected.py. What is lost is learnt back on texts, by the
divergence from the distributions of the model as it was. What comes of it is another model than the
target.

With `basis=folded` the directions are those that commute with rotations, which lose more; then
keys have the projection in their matrices too, and the folder is an ordinary model for any runtime.

Source: Yu et al., "Effectively Compress KV Heads for LLM" (arXiv 2406.07056).
Differs: the paper's text was out of reach, so that the groups (neighbours in their order), the
place of the projection after the rotation and the settings of the training are ours.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.head_merging import (
    FIELD,
    commuting_basis,
    gather_products,
    leading_basis,
    left_out,
    pooled_basis,
)
from foretell.models.decoder.learning import copy_modules
from foretell.models.decoder.projected import projected_class
from foretell.ops.files import write_text
from foretell.train import recipes
from foretell.train.amateur import TrainAmateur, merge_lora, with_lora
from foretell.train.caches.channels import FindChannels, cut_pieces
from foretell.train.heads.medusa_2 import FORMATS
from foretell.train.lm import Run, text_loss

if TYPE_CHECKING:
    from foretell.api.lm import LM

BASES = {"svd": leading_basis, "folded": commuting_basis, "mean": pooled_basis}
LAYERS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"  # that have LoRA weights
TUNED = ("none", "lora", "attention", "all")
HELD_OUT = 16  # every so many documents one is kept from training
Tell = Callable[[str, int, int | None], None]  # (what is being done, how much of it, of how much)


@dataclass(frozen=True)
class TrainKVHeads:
    """How heads are merged, and what learns afterwards. Lengths are in tokens."""

    merge: int = 2  # neighbouring key heads that become one
    basis: str = "svd"  # that they are projected on: svd, folded, or mean to compare with
    samples: int = 128  # pieces of text by which it is found
    length: int = 512  # tokens of each
    tune: str = "attention"  # what learns afterwards: none, lora, attention or all
    rank: int = 16  # of LoRA weights
    alpha: float = 32.0  # by which, divided by the rank, their product is multiplied
    distil: bool = True  # the distributions of the model as it was are learnt too, beside the texts
    window: int = 512  # of the texts that are learnt from
    tokens: int = 1_000_000  # training tokens in all
    batch: int = 4_096  # tokens a step
    micro: int = 512  # tokens a forward
    rate: float = 0.0003  # learning rate (AdamW)
    warmup: int = 10  # steps over which it rises
    decay: float = 0.6  # share of the run over which it falls to 0
    held: int = 8_192  # tokens that are held out, for the perplexity
    stored: str = "bfloat16"  # number format of the folder: bfloat16, float16 or float32
    seed: int = 0  # of LoRA weights and the choice of texts

    def __post_init__(self) -> None:
        ranges = {
            **recipes.OF_RUNS,
            "merge": (1, 1 << 10),
            "rank": (1, 4096),
            "alpha": (1e-3, 1e6),
            "rate": recipes.RATE,
            "held": (self.window + 1, 1 << 40),
        }
        recipes.check_ranges(self, ranges)
        for name, allowed_values in (("basis", BASES), ("tune", TUNED), ("stored", FORMATS)):
            if getattr(self, name) not in allowed_values:
                raise BadConfig.field(
                    name, getattr(self, name), f"one of {', '.join(allowed_values)}"
                )
        if self.batch % self.micro or self.micro % self.window:
            raise BadConfig("batch must be a multiple of micro, and micro of window")
        _ = self.basis_texts

    @property
    def basis_texts(self) -> FindChannels:
        """Settings of the texts by which the basis is found."""
        return FindChannels(samples=self.samples, length=self.length)

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.batch)

    # What Run.advance reads: all texts are of one length.
    long_share = 0.0

    @property
    def context(self) -> int:
        return self.window

    short_context = context


def count_key_heads(target: Any, config: TrainKVHeads) -> int:
    """How many key heads a target has. Raises BadConfig where they cannot be merged like this, and
    Unsupported for a model of another build.
    """
    method = "train kv-heads"
    turns_keys = getattr(getattr(target, "loop", None), "rotary", None) is not None
    if type(target) is not Decoder or not target.fused or target.narrow or not turns_keys:
        need = "a plain model of the llama family's build, in float32 by torch"
        raise Unsupported.missing_capability(method, target.name, need, "use another model")
    if len({*target.layout}) > 1 or target.layout[0][1] != target.layout[0][2]:
        need = "layers with heads of one shape"
        raise Unsupported.missing_capability(method, target.name, need, "use another model")
    heads: int = target.layout[0][0]
    if heads % config.merge:
        divisors = [str(size) for size in range(1, heads + 1) if heads % size == 0]
        allowed_values = (
            f"a divisor of the {heads} key heads of {target.name}: {', '.join(divisors)}"
        )
        raise BadConfig.field("merge", config.merge, allowed_values)
    if config.basis == "folded" and has_norms(target.hf):
        need = "keys that no norm follows"
        raise Unsupported.missing_capability("basis=folded", target.name, need, "use basis=svd")
    return heads


def has_norms(hf: Any) -> bool:
    """Whether a model's queries and keys have norms, which stand between matrices and rotation."""
    return hasattr(hf.get_decoder().layers[0].self_attn, "q_norm")


@torch.no_grad()
def compress_heads(hf: Any, bases: torch.Tensor, fold: bool) -> Any:
    """The model `hf` with heads merged on `bases` (L, 2, G, t, D, D) of its rotated keys
    and its values.

    `fold`: those of keys commute with rotations and become part of the matrices.
    """
    groups, merge = bases.shape[2:4]
    config = copy.deepcopy(hf.config)
    config.num_key_value_heads = groups
    if not fold:
        setattr(config, FIELD, {"heads": groups * merge})
    model_class: Any = type(hf)
    model = (model_class if fold else projected_class(model_class))(config).to(hf.dtype)
    module_names = {module: name for name, module in hf.named_modules()}
    state = hf.state_dict()
    for layer, layer_bases in zip(hf.get_decoder().layers, bases, strict=True):
        keys, values = layer_bases
        name_prefix = f"{module_names[layer.self_attn]}."

        def change(part: str, form: str, basis: torch.Tensor, start: str = name_prefix) -> None:
            """Multiplies the heads of a matrix, and of its bias, by what they are projected on."""
            for kind, for_outputs in (("weight", True), ("bias", False)):
                old_matrix = state.get(f"{start}{part}_proj.{kind}")
                if old_matrix is None or (part == "o" and not for_outputs):
                    continue
                new_matrix = _merge_matrix(old_matrix.double(), form, basis)
                state[f"{start}{part}_proj.{kind}"] = new_matrix.to(old_matrix.dtype)

        change("v", "cached", values)
        change("o", "output", values)
        if fold:
            change("k", "cached", keys)
            change("q", "asking", keys)
        else:
            state[f"{name_prefix}key_basis"] = keys.to(state[f"{name_prefix}k_proj.weight"].dtype)
    model.load_state_dict(state)
    if hf.generation_config is not None:
        model.generation_config = copy.deepcopy(hf.generation_config)
    return model.eval()


def _merge_matrix(matrix: torch.Tensor, form: str, basis: torch.Tensor) -> torch.Tensor:
    """A matrix (out, in) or bias (out,) of heads whose rows are projected on a basis (G, t, D, D):
    rows that are `cached`, of all heads of a group together; `asking` ones, of each head; or the
    `output`'s columns.
    """
    groups, merge, width, _ = basis.shape
    if form == "output":
        heads = matrix.unflatten(1, (groups, merge, -1, width))
        return torch.einsum("egtrd,gtdw->egtrw", heads, basis).flatten(1)
    input_columns = matrix.reshape(len(matrix), -1)
    if form == "cached":
        heads = input_columns.view(groups, merge, width, -1)
        merged_matrix = torch.einsum("gtde,gtdw->gwe", heads, basis)
    else:
        heads = input_columns.view(groups, merge, -1, width, input_columns.shape[1])
        merged_matrix = torch.einsum("gtrde,gtdw->gtrwe", heads, basis)
    return merged_matrix.reshape(-1, *matrix.shape[1:])


@dataclass
class Corpus:
    """Documents to learn from, and the tokens (n,) of some of them and of those held out."""

    documents: list[str]
    learnt: np.ndarray
    held_out: np.ndarray

    @classmethod
    def of(cls, lm: LM, documents: Iterable[str], config: TrainKVHeads) -> Corpus:
        """Divides and encodes documents. Raises BadConfig where there are too few."""
        texts = [text for text in documents if text.strip()]
        text_order = np.random.default_rng(config.seed).permutation(len(texts))
        parts = [
            [
                texts[i]
                for place, i in enumerate(text_order)
                if (place % HELD_OUT == 0) == is_held_out
            ]
            for is_held_out in (False, True)
        ]
        end_tokens = lm.engine.eos[:1]
        token_arrays = []
        for part, wanted_tokens in zip(parts, (config.tokens, config.held), strict=True):
            tokens: list[int] = []
            for text in part:
                if len(tokens) < wanted_tokens:
                    tokens += [*lm.encode(text, special=False), *end_tokens]
            token_arrays.append(np.array(tokens[:wanted_tokens], np.int32))
        if min(map(len, token_arrays)) < config.window + 2:
            raise BadConfig(
                f"the texts are too few: of those that learn and of the {HELD_OUT}th part that is "
                f"held out, more than window={config.window} tokens each are needed; give more"
            )
        return cls(parts[0], *token_arrays)


@torch.no_grad()
def perplexity(hf: Any, tokens: np.ndarray, window: int) -> float:
    """Perplexity of tokens (n,), at least a window and one more, read in windows."""
    token_rows = torch.from_numpy(
        tokens[: 1 + (len(tokens) - 1) // window * window].astype(np.int64)
    )
    windows = token_rows.unfold(0, window + 1, window)
    return math.exp(np.mean([float(text_loss(hf, None, row[None])) for row in windows]))


class HeadsRun(Run):
    """A run folder of a compressed model, of which a part learns."""

    def make_optimisers(self, layers: torch.nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
        weights = [p for p in layers.parameters() if p.requires_grad]
        rate = self.config.rate
        return [(torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.0), rate)]


def train_kv_heads(
    lm: LM,
    documents: Iterable[str],
    out: Path,
    config: TrainKVHeads,
    save_every: float = 300.0,
    quiet: bool = False,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Merges heads and trains until `config.tokens` are seen; writes OUT/model and OUT/report.json,
    and returns the report.

    `lm`: a model in float32 by torch, which stays as it is. Raises BadConfig, Unsupported.
    """
    target: Any = lm.models["target"]
    heads = count_key_heads(target, config)
    corpus = Corpus.of(lm, documents, config)
    texts = list(cut_pieces(lm, corpus.documents, config.basis_texts))

    def noted() -> Iterable[list[int]]:
        for texts_read, text in enumerate(texts):
            if tell is not None:
                tell("reading", texts_read, len(texts))
            yield text

    products, tokens = gather_products(target, noted(), config.merge)
    bases = BASES[config.basis](products, config.merge)
    lost_shares = left_out(products, bases).sum((0, 2)) / products.diagonal(dim1=-2, dim2=-1).sum(
        (0, 2, 3)
    )
    original_model = copy_modules(target).requires_grad_(False)
    folds_keys = config.basis != "svd" and not has_norms(original_model)
    hf = compress_heads(original_model, bases, folds_keys)
    perplexities = {
        "before": perplexity(original_model, corpus.held_out, config.window),
        "merged": perplexity(hf, corpus.held_out, config.window),
    }
    out.mkdir(parents=True, exist_ok=True)
    size = 0
    if config.tune != "none":
        layers = choose_learning(hf, config)
        run = HeadsRun(out, config, hf, hf)
        size = run.parameter_count
        teacher = original_model if config.distil else None
        run.run_steps(lambda: run.advance(corpus.learnt, teacher), save_every, quiet)
        merge_lora(hf, layers)
        perplexities["tuned"] = perplexity(hf, corpus.held_out, config.window)
    report: dict[str, Any] = {
        "heads": {"before": heads, "after": heads // config.merge},
        "lost": {
            name: round(float(share), 4)
            for name, share in zip(("keys", "values"), lost_shares, strict=True)
        },
        "calibrated": tokens,
        "parameters": size,
        "tokens_seen": config.steps * config.batch if size else 0,
        "perplexity": {name: round(value, 4) for name, value in perplexities.items()},
        "settings": asdict(config),
    }
    hf.to(FORMATS[config.stored]).save_pretrained(out / "model")
    if lm.tokenizer is not None:
        lm.tokenizer.save_pretrained(out / "model")
    write_text(out / "report.json", json.dumps(report, indent=1))
    return report


def choose_learning(hf: Any, config: TrainKVHeads) -> dict[str, Any]:
    """Leaves gradients to what is to learn; returns the LoRA weights that it put on, by layer."""
    if config.tune == "lora":
        lora = TrainAmateur(config.rank, config.alpha, LAYERS, seed=config.seed)
        return dict(with_lora(hf, lora))
    hf.requires_grad_(config.tune == "all")
    for layer in hf.get_decoder().layers:
        layer.self_attn.requires_grad_(True)
    return {}
