"""Experts whose matrices lie together, and the router that chooses among them."""

from __future__ import annotations

import torch

from foretell.models.decoder.packed_experts import pack_router
from foretell.native.packing import unpack_matrix
from tests.models.decoder.families import tiny


def test_a_router_loses_no_bit() -> None:
    """Near ties decide which expert computes a token, so it is not rounded with its layer."""
    router = tiny("qwen3_moe").get_decoder().layers[0].mlp.gate
    packed = pack_router(router).packed
    assert torch.equal(unpack_matrix(packed)[:, : router.weight.shape[1]], router.weight)
