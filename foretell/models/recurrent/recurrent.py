"""Decoders with recurrent layers, alone (Mamba) or among layers that attend (Jamba, Qwen3-Next).

The model runs whole, as a twin: a copy of the modules that lead to its recurrent layers, with all
weights and all other modules shared, in which mixers of ours (mixers.py) stand for those layers.
The model itself is not changed. So these decoders take packed requests, chunks and trees as any
other does. What a recurrent layer remembers of a text is held by its cache, and drafts that are
rejected never touch it.

When a model is loaded, rows of a tree behind a prompt in pieces, and the row behind accepted
drafts, are compared with those of the model's own forward, and these with what its own `generate`
sees.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from foretell.cache.buffers import Layout, Shape
from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.cache.policy import Segment
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import Unsupported
from foretell.models.decoder.decoder import Accelerate, Decoder
from foretell.models.decoder.loop import Loop
from foretell.models.decoder.own import own_adapter
from foretell.models.decoder.packed import WHOLE_NUMBERS
from foretell.models.recurrent.mixers import (
    Held,
    Mixer,
    ShortConvolution,
    State,
    StateSpaceDual,
    size,
)
from foretell.models.recurrent.stepwise import DeltaRule, GatedLinear, Selective, SplitDeltaRule

if TYPE_CHECKING:
    from foretell.core.request import Request

# By the name of transformers' class. What they compute is compared with it when a model is loaded.
KINDS: dict[str, type[Mixer]] = {
    "Mamba2Mixer": StateSpaceDual,
    "BambaMixer": StateSpaceDual,
    "FalconH1Mixer": StateSpaceDual,
    "GraniteMoeHybridMambaLayer": StateSpaceDual,
    "NemotronHMamba2Mixer": StateSpaceDual,
    "Zamba2MambaMixer": StateSpaceDual,
    "MambaMixer": Selective,
    "FalconMambaMixer": Selective,
    "JambaMambaMixer": Selective,
    "Qwen3NextGatedDeltaNet": DeltaRule,
    "Qwen3_5GatedDeltaNet": SplitDeltaRule,
    "Qwen3_5MoeGatedDeltaNet": SplitDeltaRule,
    "RecurrentGemmaRecurrentBlock": GatedLinear,
    "Lfm2ShortConv": ShortConvolution,
    "Lfm2MoeShortConv": ShortConvolution,
}

# Families whose every kind of layer the project's tests compare with transformers. They are
# tested when loaded too, but for number formats whose rounding may hide what is right.
PROVEN = frozenset(
    "mamba falcon_mamba mamba2 falcon_h1 bamba granitemoehybrid jamba qwen3_next qwen3_5_text "
    "qwen3_5_moe_text recurrent_gemma lfm2 lfm2_moe".split()
)


class StateCache(Cache):
    """Rows of the layers that attend, and what each recurrent layer remembers of the text.

    States belong to the whole text, so they are neither shared with texts that begin alike nor
    begun with what others computed. `start`: of each recurrent layer, before the first token.
    """

    sharable = False

    def __init__(
        self,
        layout: Sequence[Shape | None],
        dtype: torch.dtype,
        device: torch.device,
        mixers: Mapping[int, Mixer],
        start: Mapping[int, State],
    ):
        self.mixers = mixers
        self.start = start
        self.held = {layer: Held.of(state) for layer, state in start.items()}
        super().__init__(layout, dtype, device)

    def _clear_scratch(self) -> None:
        super()._clear_scratch()
        for held in self.held.values():
            held.clear()

    def fork(self) -> Cache:
        twin = super().fork()
        assert isinstance(twin, StateCache)
        # What they hold is replaced and never written into, so that both may have it.
        twin.held = {layer: replace(held) for layer, held in self.held.items()}
        return twin

    def forget(self) -> None:
        super().forget()
        self.held = {layer: Held.of(state) for layer, state in self.start.items()}

    def adopt(self, segment: Segment) -> bool:
        return False

    @property
    def bytes(self) -> int:
        """Of its rows and of all that recurrent layers hold, the last forward's part included."""
        total = super().bytes
        for held in self.held.values():
            total += held.text.bytes + sum(size(part) for part in (held.rows, *held.steps))
            if held.ahead is not held.text:
                total += held.ahead.bytes
        return total

    @torch.inference_mode()
    def keep(self, nodes: Sequence[int]) -> int:
        """Adds these scratch nodes, a path, to what is remembered.

        All are kept, or none where the path ends among tokens that were pending.
        """
        pending = 0 if self.plan is None else self.plan.pending
        if not nodes or len(nodes) < pending:
            return 0
        path = [node - pending for node in nodes[pending:]]
        for layer, held in self.held.items():
            held.text = self.mixers[layer].after(held, path)
        return super().keep(nodes)

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        job, done = super().prepare(ask, tokens, chunk)
        if self.plan is not None and 0 < self.plan.shared < self.plan.pending:
            # There is no state in the middle of the pending tokens to go on from.
            self._clear_scratch()
            job, done = super().prepare(ask, tokens, chunk)
        return job, done


class Recurrent(Decoder):
    """A transformers causal language model with recurrent layers; takes chains and trees.

    Raises Unsupported, naming the reason, where it cannot be computed right.
    """

    mixers: dict[int, Mixer]  # of each layer with a recurrent part
    start: dict[int, State]  # of each, before the first token
    twin: PreTrainedModel

    def __init__(self, hf: PreTrainedModel, name: str = "model"):
        super().__init__(hf, name)

    def _layout(self) -> tuple[Layout, list[int | None]]:
        if self.narrow:
            raise self._refusal("linear layers that are not of 8 or 4 bits beside recurrent ones")
        self.mixers = mixers_of(self.hf)
        self.twin = twin_of(self.hf, self.mixers)
        reasons = [mixer.refusal() for mixer in self.mixers.values()]
        for reason in filter(None, reasons):
            raise self._refusal(reason)
        self.start = {
            layer: mixer.start(self.dtype, self.device) for layer, mixer in self.mixers.items()
        }
        self.state_bytes = sum(start.bytes for start in self.start.values())
        calls = self._attention_calls(others=self.mixers)
        count = 1 + max([*calls, *self.mixers])
        layout: Any = tuple(calls[i].shape if i in calls else None for i in range(count))
        return layout, [calls[i].window if i in calls else None for i in range(count)]

    def _loop(self, windows: list[int | None], accelerate: Accelerate | None) -> Loop | None:
        self.loop_refused = "its recurrent layers run in the model's own loop"
        return None

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache = StateCache(self.layout, self.dtype, self.device, self.mixers, self.start)
        return self.prepared(cache, request, beside)

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        chosen = {"logits_to_keep": rows.long()} if self.takes_rows else {}
        mask = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        with self._attention():
            out = self.twin(
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask,  # 4-D: transformers builds none
                use_cache=False,
                **chosen,
            )
        return out.logits[0] if chosen else out.logits[0][rows.long()], {}

    def self_test(self) -> None:
        wide = self.dtype in (torch.float32, torch.float64)
        if self.config.model_type in PROVEN and not wide:
            return
        super().self_test()
        self._test_accepted()
        self._test_own_steps()

    def _test_accepted(self) -> None:
        """The row behind accepted drafts must be the one of the model's own forward."""
        cache = self.cache()
        tree = TokenTree(self.probe_ids[-1]).chain([1, 2]).chain([0], at=1)
        accepted = [*self.probe_ids, 1, 0, 2]
        for ask, tokens in ((Ask(tree), self.probe_ids), (Ask(TokenTree(2)), accepted)):
            job, _ = cache.prepare(ask, tokens, len(tokens))
            reply = self.forward([job])[0]
        whole = self._stock_rows(torch.tensor([accepted], device=self.device))
        if cache.length < len(accepted) - 1 or not self.agrees(reply.logits[-1], whole[-1]):
            raise self._refusal(
                "a state that goes on behind accepted drafts, and a self-test found another one"
            )

    def _test_own_steps(self) -> None:
        """What `generate` sees, token by token, must be what the model's whole forward gives."""
        ids = torch.tensor([self.probe_ids], device=self.device)
        plain = GenerationConfig(
            max_new_tokens=3,
            do_sample=False,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        made = self.hf.generate(ids, attention_mask=torch.ones_like(ids), generation_config=plain)
        seen = torch.cat(list(made.logits))
        whole = self._stock_rows(made.sequences)[-len(seen) - 1 : -1]
        if not self.agrees(seen, whole):
            raise self._refusal(
                "steps of its own that give what its own whole forward gives, and a self-test "
                "found that they do not"
            )


def mixers_of(hf: PreTrainedModel) -> dict[int, Mixer]:
    """Of each layer with a recurrent part the mixer that computes it."""
    mixers = {}
    for name, module in hf.named_modules():
        kind = KINDS.get(type(module).__name__)
        if kind is not None:
            layer = next(int(part) for part in name.split(".") if part.isdigit())
            mixers[layer] = kind(module, layer)
    return mixers


def twin_of(hf: PreTrainedModel, mixers: Mapping[int, Mixer]) -> PreTrainedModel:
    """The model with these mixers in the places of its own.

    Only modules that contain one are copied; weights, configurations and the rest are the model's.
    """
    instead = {id(mixer.stock): mixer for mixer in mixers.values()}
    above = {id(hf)}
    for name, module in hf.named_modules():
        if id(module) in instead:
            parts = name.split(".")
            above |= {id(hf.get_submodule(".".join(parts[:end]))) for end in range(len(parts))}
    shared: dict[int, Any] = {id(tensor): tensor for tensor in chain(hf.parameters(), hf.buffers())}
    for module in hf.modules():
        config = getattr(module, "config", None)
        if config is not None:
            shared[id(config)] = config
        if id(module) not in above:
            shared[id(module)] = module
    return copy.deepcopy(hf, shared | instead)


def loaded(
    hf: PreTrainedModel, name: str, exact_bits: bool, dtype: str, executor: str
) -> Recurrent | None:
    """The adapter for the options of `load`; None: the model has no recurrent layers.

    Torch alone computes these layers. Raises Unsupported for options that ask for another way.
    """
    if not is_recurrent(hf):
        return None
    asked = []
    if exact_bits:
        asked.append("exact_bits=True")
    if dtype in WHOLE_NUMBERS:
        asked.append(f"dtype={dtype!r}")
    if executor not in ("auto", "torch"):
        asked.append(f"executor={executor!r}")
    if asked:
        need = "a model without recurrent layers"
        cure = "leave it out: torch computes these, in bfloat16 or float32"
        raise Unsupported.missing(asked[0], name, need, cure)
    return Recurrent(hf, name)


def is_recurrent(hf: PreTrainedModel) -> bool:
    """Whether it has layers that `Recurrent` computes."""
    return any(type(module).__name__ in KINDS for module in hf.modules())


def decoder_of(
    hf: PreTrainedModel, name: str = "model", accelerate: Accelerate | None = None
) -> Decoder:
    """The adapter of a transformers causal language model. Raises Unsupported."""
    if is_recurrent(hf):
        return Recurrent(hf, name)
    return own_adapter(hf, name) or Decoder(hf, name, accelerate)
