"""The LoRA weights that come with the package and make `smollm2` fill canvases.

What they do on that model is tested in `tests/real`: it is fetched, which these tests do without.
"""

from __future__ import annotations

import hashlib

from safetensors import safe_open

from foretell.loading import names as aliases
from foretell.loading.fetch import fetch_shipped
from foretell.models.decoder import adapted

FOLDER = fetch_shipped("smollm2-dlm")


def test_they_are_what_the_table_says_and_small() -> None:
    (source,) = aliases.find_alias("smollm2-dlm").sources
    assert isinstance(source, aliases.LoraSource) and source.base == "smollm2"
    assert source.lora.endswith(FOLDER.name)
    weights = (FOLDER / adapted.WEIGHTS).read_bytes()
    assert hashlib.sha256(weights).hexdigest() == source.sha256
    assert len(weights) <= 20e6


def test_they_are_on_all_projections_of_all_layers() -> None:
    settings = adapted.read_settings(FOLDER / adapted.CONFIG)
    assert settings["canvas"] == {"mask_id": 49152, "shift": 1, "block": 0}
    with safe_open(FOLDER / adapted.WEIGHTS, "pt") as opened:
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    assert len(shapes) == 30 * 7 * 2
    down = "base_model.model.model.layers.29.mlp.down_proj.lora_{}.weight"
    assert shapes[down.format("A")] == [settings["r"], 1536]
    assert shapes[down.format("B")] == [576, settings["r"]]
