"""Whether a backend computes what torch does, shown on a tree before it computes anything else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from foretell.core.tree import TokenTree
from foretell.errors import first_message_line
from foretell.models.backend import Backend
from foretell.models.decoder.packed import is_as_near, without_rounding
from foretell.models.decoder.packed_experts import PackedExperts

FEW = 3  # layers of a mixture that are compared, in which every expert computes every token


def check_backend(decoder: Any, backend: Backend) -> None:
    """Raises LookupError where a backend fails, or gives other logits than torch.

    A tree that it was not recorded with, below rows of another forward, shows what was wrongly
    recorded as a constant. In a mixture of experts rounding may choose another expert and so
    another row: there all experts compute all tokens, in a few of the layers.
    """
    has_experts = any(isinstance(module, PackedExperts) for module in decoder.hf.modules())
    layers = None
    if has_experts:
        last_layer = len(decoder.layout) - 1
        layers = tuple(sorted({0, last_layer // 2, last_layer})[:FEW])
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(decoder.vocab, (12,), generator=generator).tolist()
    tree = TokenTree(token_ids[5]).chain(token_ids[6:9]).chain(token_ids[9:11])

    def tree_rows(computed_by: Backend | None) -> torch.Tensor:
        previous, decoder.backend = decoder.backend, computed_by
        try:
            with torch.inference_mode():
                rows: torch.Tensor = decoder.tree_rows(tree, token_ids[:6], layers)
                return rows
        finally:
            decoder.backend = previous

    def exact_rows() -> torch.Tensor:
        with without_rounding():
            return tree_rows(None)

    with use_all_experts(decoder.hf, backend) if has_experts else nullcontext():
        try:
            by_torch, by_backend = tree_rows(None), tree_rows(backend)
        except Exception as error:  # a runtime may refuse a graph only when it compiles or runs it
            raise LookupError(f"it fails: {first_message_line(error)}") from error
        if decoder.narrow:
            agrees = is_as_near(by_backend, by_torch, exact_rows)
        else:
            agrees = decoder.agrees(by_backend, by_torch)
    if not agrees:
        raise LookupError("its logits differ from torch's by more than rounding")


@contextmanager
def use_all_experts(hf_model: nn.Module, backend: Any) -> Iterator[None]:
    """Inside, every token is computed by all experts of a layer."""
    routers: list[Any] = [
        module
        for module in hf_model.modules()
        if isinstance(getattr(module, "top_k", None), int) and hasattr(module, "num_experts")
    ]
    chosen = [router.top_k for router in routers]
    structures = list(getattr(backend, "experts", ()))
    chosen_there = [structure.chosen for structure in structures]
    try:
        for router in routers:
            router.top_k = router.num_experts
        for structure in structures:
            structure.chosen = structure.count
        yield
    finally:
        for router, count in zip(routers, chosen, strict=True):
            router.top_k = count
        for structure, count in zip(structures, chosen_there, strict=True):
            structure.chosen = count
