"""A stock, unpatched transformers decoder as a Model.

The model's own modules run on the packed row; attention is registered through transformers' AttentionInterface. Where
a family has the usual skeleton the loop over its layers is ours too (`Loop`), which gives hidden states, layer subsets
and entry in the middle; others run whole. What a family really does is measured when it is loaded, never looked up by
its name, and one that cannot be right is refused before the first forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from foretell.cache import Job, Layout
from foretell.errors import Unsupported
from foretell.model import STEP, Model, forest_attention
from foretell.tree import TokenTree

Block = Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]  # (hidden (1, T, E), rotary, positions) -> hidden
PROBE = torch.tensor([[1, 3, 2, 0, 3, 1, 2]])
# Families whose packed forward the project's tests compare with transformers' own; others are tested when loaded.
PROVEN = frozenset(
    "llama qwen2 qwen3 mistral gemma2 gemma3_text phi3 olmo2 smollm3 granite stablelm starcoder2 cohere2 gpt_neox "
    "gpt2 opt glm4 mixtral qwen3_moe gpt_oss deepseek_v3 nanochat".split()
)


def _interface(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: Any,
               scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
               s_aux: torch.Tensor | None = None, **_: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    out = forest_attention(int(module.layer_idx), q[0], k[0], v[0], scaling, sliding_window, softcap, s_aux)  # type: ignore[arg-type]
    return out[None], None


AttentionInterface.register("foretell", _interface)
AttentionMaskInterface.register("foretell", lambda *args, **kwargs: None)


@dataclass
class Probe:
    """Stands for a job while a model is looked at: one chain, nothing stored, shapes noted."""

    tokens: list[int]
    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes[layer] = (k.shape[0], k.shape[-1], v.shape[-1])
        return k, v

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        n = len(self.tokens)
        return torch.full((n, n), -torch.inf, dtype=dtype).triu_(1)


class Loop:
    """The usual skeleton of a decoder taken apart: embedding, layers, final norm, head. Raises LookupError if unusual."""

    def __init__(self, hf: PreTrainedModel, probe: Callable[[], torch.Tensor]):
        body = next((m for m in hf.modules() if isinstance(getattr(m, "layers", None), torch.nn.ModuleList)), None)
        rotary, norm = getattr(body, "rotary_emb", None), getattr(body, "norm", getattr(body, "final_layer_norm", None))
        embed, head = hf.get_input_embeddings(), hf.get_output_embeddings()
        if body is None or rotary is None or norm is None or embed is None or head is None:
            raise LookupError("not the usual skeleton")
        self.config = hf.config.get_text_config()
        self.embed, self.norm, self.head, self.rotary = embed, norm, head, rotary
        self.layers: Sequence[torch.nn.Module] = body.layers
        self.kinds: list[str] | None = None
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            self.kinds = list(self.config.layer_types)
        self.scale = 1.0
        seen: list[torch.Tensor] = []
        hook = self.layers[0].register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True)  # fmt: skip
        self.reference = probe()
        hook.remove()
        plain = embed(PROBE.to(self.reference.device))
        self.scale = float((seen[0].float() * plain.float()).sum() / plain.float().square().sum())
        self.blocks: list[Block] = [self._stock(layer) for layer in self.layers]

    @staticmethod
    def _stock(layer: torch.nn.Module) -> Block:
        def block(h: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
            out = layer(h, attention_mask=None, position_ids=positions, position_embeddings=rotary,
                        past_key_values=None, use_cache=False)  # fmt: skip
            return out[0] if isinstance(out, tuple) else out

        return block

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.embed(ids)
        return h if abs(self.scale - 1) < 1e-3 else h * torch.tensor(self.scale, dtype=h.dtype, device=h.device)

    def run(self, h: torch.Tensor, positions: torch.Tensor, layers: Sequence[int], taps: Sequence[int],
            hidden: dict[int, torch.Tensor]) -> torch.Tensor:  # fmt: skip
        """h (1, T, E) through `layers`; `hidden[i]` becomes what enters layer i, len(self.layers): what leaves the last."""
        if self.kinds is None:
            shared = self.rotary(h, positions)
            rotary = [shared] * len(self.layers)
        else:
            each = {kind: self.rotary(h, positions, kind) for kind in dict.fromkeys(self.kinds)}
            rotary = [each[kind] for kind in self.kinds]
        for i in layers:
            if i in taps:
                hidden[i] = h[0]
            h = self.blocks[i](h, rotary[i], positions)
        if taps and max(taps) > max(layers, default=-1):
            hidden[max(taps)] = h[0]
        return h

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """(n, E) -> (n, V)."""
        out: torch.Tensor = self.head(self.norm(h))
        out = out * getattr(self.config, "logit_scale", None) if getattr(self.config, "logit_scale", None) else out
        out = out / self.config.logits_scaling if getattr(self.config, "logits_scaling", None) else out
        cap = getattr(self.config, "final_logit_softcapping", None)
        return cap * torch.tanh(out / cap) if cap else out


class Decoder(Model):
    """A transformers causal language model. `caps`: `tree`, and `layers` (taps, subsets, entry) where the loop is ours.

    `accelerate(loop)` may replace the loop's blocks by faster equals; they are kept only if a probe agrees.
    Raises Unsupported, naming the reason, when the family cannot be computed right.
    """

    def __init__(self, hf: PreTrainedModel, name: str = "model",
                 accelerate: Callable[[Loop], list[Block] | None] | None = None):  # fmt: skip
        self.hf, self.name = hf.eval(), name
        self.config = hf.config.get_text_config()
        self.device, self.dtype = hf.device, hf.dtype
        self.vocab = int(hf.get_output_embeddings().weight.shape[0])
        self.context = self._context()
        self.before = self.config._attn_implementation
        self.attach()
        with torch.inference_mode():
            self.layout = self._layout()
            self.loop = self._loop(accelerate)
        self.caps = frozenset({"tree"} | ({"layers"} if self.loop else set()))
        if self.config.model_type not in PROVEN:
            self.self_test()

    def attach(self) -> None:
        self.config._attn_implementation = "foretell"

    def detach(self) -> None:
        """Gives the transformers model its own attention back."""
        self.config._attn_implementation = self.before

    def _context(self) -> int:
        scaling = getattr(self.config, "rope_parameters", None) or {}
        if isinstance(scaling, dict) and scaling.get("rope_type") in ("dynamic", "longrope"):
            # Their frequencies depend on the longest request of a forward, so only the original range is exact.
            original = scaling.get("original_max_position_embeddings")
            return int(original or getattr(self.config, "original_max_position_embeddings", None) or self.config.max_position_embeddings)
        return int(getattr(self.config, "max_position_embeddings", None) or 1 << 20)

    def _refuse(self, capability: str, cure: str = "use transformers' own generate for it") -> Unsupported:
        self.detach()
        return Unsupported.missing("foretell", f"{self.name} (family {self.config.model_type})", capability, cure)

    def _whole(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (n, V) from the model's own forward. A 4-D mask keeps transformers from building one."""
        skip = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        keep: Any = 0 if rows is None else rows
        out = self.hf(input_ids=ids, position_ids=positions, attention_mask=skip, use_cache=False, logits_to_keep=keep)
        return out.logits[0]  # type: ignore[no-any-return]

    def _layout(self) -> Layout:
        probe = Probe(PROBE[0].tolist())
        token = STEP.set([probe])
        try:
            ids = PROBE.to(self.device)
            self._whole(ids, torch.arange(ids.shape[1], device=self.device)[None])
        except (AttributeError, TypeError, RuntimeError, ValueError) as error:
            raise self._refuse(f"the usual arguments of a decoder ({error})") from error
        finally:
            STEP.reset(token)
        count = int(self.config.num_hidden_layers)
        missing = [i for i in range(count) if i not in probe.shapes]
        if missing:
            raise self._refuse(f"attention through transformers' interface in every layer, which layers "
                               f"{', '.join(map(str, missing[:6]))} do not use (recurrent, or of an older kind)")  # fmt: skip
        return tuple(probe.shapes[i] for i in range(count))

    def _loop(self, accelerate: Callable[[Loop], list[Block] | None] | None) -> Loop | None:
        ids = PROBE.to(self.device)
        positions = torch.arange(ids.shape[1], device=self.device)[None]
        token = STEP.set([Probe(ids[0].tolist())])

        def ours(loop: Loop) -> torch.Tensor:
            return loop.logits(loop.run(loop.embedded(ids), positions, range(len(loop.layers)), (), {})[0])

        try:
            loop = Loop(self.hf, lambda: self._whole(ids, positions))
            tolerance = 1e-4 if self.dtype in (torch.float32, torch.float64) else 0.1
            if not torch.allclose(ours(loop).float(), loop.reference.float(), atol=tolerance, rtol=tolerance):
                return None
            blocks = accelerate(loop) if accelerate else None
            if blocks is not None:
                stock, loop.blocks = loop.blocks, blocks
                if not torch.allclose(ours(loop).float(), loop.reference.float(), atol=tolerance, rtol=tolerance):
                    loop.blocks = stock
            return loop
        except (LookupError, AttributeError, TypeError):
            return None  # it runs whole; `layers` is then a capability it lacks, which methods are told by name
        finally:
            STEP.reset(token)

    def run(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, first: Job,
            taps: Sequence[int]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:  # fmt: skip
        hidden: dict[int, torch.Tensor] = {}
        if self.loop is None:
            return self._whole(ids, positions, rows.long()), hidden
        if first.states is None:
            h = self.loop.embedded(ids)
        else:
            h = torch.cat([job.states for job in STEP.get() if job.states is not None])[None]
        order = range(len(self.layout)) if first.layers is None else first.layers
        h = self.loop.run(h, positions, order, taps, hidden)[0]
        if not len(rows):
            return h.new_zeros(0, self.vocab), hidden
        return self.loop.logits(h if len(rows) == len(h) else h[rows]), hidden

    def self_test(self) -> None:
        """A tree's rows must be those of its paths, computed one by one by the model's own attention."""
        prompt = PROBE[0].tolist()
        tree = TokenTree(prompt[-1]).chain([1, 2]).chain([3, 0]).chain([0], at=1)
        rows = self.score(prompt, tree)
        self.detach()
        try:
            for node in range(len(tree)):
                ids = torch.tensor([prompt + tree.words(node)], device=self.device)
                with torch.inference_mode():
                    row = self.hf(input_ids=ids, use_cache=False).logits[0, -1].to(rows.dtype)
                if float((row - rows[node]).abs().max()) > 0.02 * float(row.abs().max()) + 1e-3:
                    raise self._refuse("a packed tree to give the rows of its paths, which a self-test found it does not")
        finally:
            self.attach()

