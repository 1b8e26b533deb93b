"""The description of a decoder layer: what it computes, and where its weights are.

The C library, torch's fused layers and the pages read the same description. A family fills it from
its configuration, in a file of this folder (see `find_family`). Families that are built as llama is
need none: the defaults are llama's.

With x the sum over layers that enters this one:

    x += residual * after_attention(out(attention(before_attention(x))))
    x += residual * after_mlp(mlp(before_mlp(x)))

Where it is `parallel`, both halves read the x that enters, and are added at once.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


@dataclass(frozen=True)
class ExpertsDescription:
    """How a layer's experts are chosen and what they compute. Parts are paths within the layer.

    A token is computed by the `chosen` experts with the highest scores, weighed by the "softmax" of
    all scores, by the "softmax_of_chosen" ones, or by the "logistic" function of each.
    """

    count: int
    chosen: int
    scoring: str = "softmax"
    renormalized: bool = False  # the weights of those chosen are divided by their sum
    scaling: float = 1.0  # of the weights
    groups: int = 1  # experts are chosen among those of the `chosen_groups` best groups
    chosen_groups: int = 1
    group_best: int = 1  # how many of a group's highest scores say how good it is
    block: str = "mlp"  # the module that computes all of this
    router: str = "mlp.gate"
    choice_bias: str = ""  # a tensor that is added to scores for the choice alone
    share: str = ""  # a matrix (1, E): how much of the layer's own MLP is added
    # The module with the matrices of all experts, stacked: gate_up_proj (X, 2 I, E) and down_proj
    # (X, E, I), or `transposed`, with neighbours for gate and up, and biases beside them.
    experts: str = "mlp.experts"
    transposed: bool = False
    activation: str = "silu"


@dataclass(frozen=True)
class LayerDescription:
    """What one decoder layer computes. Parts are paths of modules within the layer; "": none."""

    # Norms: "rms" divides by the root mean square, "layer" takes the mean away before.
    norm: str = "rms"
    norm_offset: float = 0.0  # added to every weight of a norm
    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    query_norm: str = ""
    key_norm: str = ""
    whole_heads: bool = False  # all query heads are normed at once, and all key heads
    # Matrices: three of queries, keys and values, or `qkv`, which holds them in this order.
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    qkv: str = ""
    qkv_by_head: bool = False  # query, key and value of a head lie beside each other
    out: str = "self_attn.o_proj"
    gate: str = "mlp.gate_proj"  # "": down(activation(up(x)))
    up: str = "mlp.up_proj"
    gate_up: str = ""  # both in one matrix, in this order
    down: str = "mlp.down_proj"
    activation: str = "silu"
    experts: ExpertsDescription | None = None  # in place of the MLP or, where it has one, beside it
    # Attention.
    attention: str = "self_attn"
    rotation: str = "halves"  # or "interleaved", or "": heads are not turned
    angles_once: bool = False  # the family's tables have each angle once, not twice
    scale: float | None = None  # of scores; None: width ** -0.5
    score_cap: float = 0.0  # cap * tanh(score / cap); 0: no cap
    sinks: str = ""  # a parameter: scores of rows that have no values
    # What the layer adds.
    residual: float = 1.0
    parallel: bool = False

    @property
    def matrices(self) -> tuple[str, ...]:
        """The modules that hold matrices."""
        attention = (self.qkv,) if self.qkv else (self.query, self.key, self.value)
        mlp = (self.gate_up,) if self.gate_up else (self.gate, self.up)
        if self.experts is not None and self.experts.share:
            mlp = (*mlp, self.experts.share)
        return tuple(name for name in (*attention, self.out, *mlp, self.down) if name)

    @property
    def norms(self) -> tuple[str, ...]:
        """The modules that norm."""
        halves = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(dict.fromkeys(n for n in (*halves, self.query_norm, self.key_norm) if n))

    @property
    def is_plain(self) -> bool:
        """Whether it computes what a llama layer does, norms of heads and biases aside."""
        usual = LayerDescription()
        names = [
            *("norm", "norm_offset", "after_attention", "after_mlp", "whole_heads", "qkv", "gate"),
            *("gate_up", "rotation", "score_cap", "sinks", "residual", "parallel", "experts"),
            "angles_once",
        ]
        named_norms = self.before_attention and self.before_mlp
        return bool(named_norms) and all(
            getattr(self, name) == getattr(usual, name) for name in names
        )

    def differences(self) -> dict[str, Any]:
        """The fields in which it differs from a llama layer's, by name."""
        usual = LayerDescription()
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != getattr(usual, field.name)
        }


@dataclass(frozen=True)
class SkeletonDescription:
    """Where a decoder has what surrounds its layers: names of its attributes; "": none."""

    layers: str = "layers"
    norms: tuple[str, ...] = (
        "norm",
        "final_layer_norm",
        "final_layernorm",
    )  # which of these it has
    rotary: str = "rotary_emb"  # the module that makes the tables by which heads turn
    # Embeddings of positions, which are added to those of tokens, and which row is position 0's.
    positions: str = ""
    first_position: int = 0

    def layers_of(self, body: Any) -> Sequence[Any]:
        """The layers of a decoder; none where it has no such part."""
        layers: Sequence[Any] = getattr(body, self.layers, ())
        return layers


class ConfigFields:
    """A configuration whose fields are noted as they are read: what a description does not read is
    not honoured.
    """

    def __init__(self, config: Any):
        self.config = config
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.config, name, None)

    def note(self, *names: str) -> None:
        """Notes fields that change nothing here, or that the modules honour by themselves."""
        self.read.update(names)

    def kind_of(self, layer: int) -> str:
        """The kind of a layer, as `layer_types` names it; "": the configuration names none."""
        layer_types = self.layer_types
        return str(layer_types[layer]) if layer_types else ""

    def activation(self, field_name: str = "hidden_act") -> str:
        """The activation that a field names. Raises LookupError for one that is not known."""
        value = getattr(self, field_name)
        if value not in ACTIVATIONS:
            raise LookupError(f"it has the activation {value!r}, which is not known here")
        return ACTIVATIONS[value]


Describe = Callable[[ConfigFields, int], LayerDescription]


def describe_llama(config: ConfigFields, layer: int) -> LayerDescription:
    """Describes a layer of llama, and of whatever is built as it is."""
    return LayerDescription(activation=config.activation())


def find_family(model_type: str) -> Describe | None:
    """Finds the function `describe` of the family's file; None: no file names the type."""
    module = _family_module(model_type)
    describe: Describe | None = module and module.describe
    return describe


def find_skeleton(config: Any) -> SkeletonDescription:
    """Describes what surrounds the layers, as the family's file says (`describe_skeleton`); the
    usual skeleton where it says nothing. Raises LookupError for what no description says.
    """
    describe = getattr(_family_module(str(config.model_type)), "describe_skeleton", None)
    if describe is None:
        return SkeletonDescription()
    skeleton: SkeletonDescription = describe(ConfigFields(config))
    return skeleton


def known_families() -> list[str]:
    """The model types that files of this folder name, sorted."""
    return sorted(_family_files())


def _family_module(model_type: str) -> Any:
    module_name = _family_files().get(model_type)
    if module_name is None:
        return None
    return importlib.import_module(f"foretell.models.families.{module_name}")


@cache
def _family_files() -> dict[str, str]:
    """The file that describes each model type, found by the constant MODEL_TYPES in it."""
    files: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_TYPES":
                files.update(dict.fromkeys(ast.literal_eval(node.value), path.stem))
    return files
