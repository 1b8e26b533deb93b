"""The head that comes with the package for `smollm2`."""

from __future__ import annotations

import pytest

from foretell import spec
from foretell.drafters.heads.networks.base import HeadConfig
from foretell.drafters.heads.networks.folder import build_head, read_config, read_tensors
from foretell.errors import ForetellError
from foretell.loading.fetch import fetch_shipped

FOLDER = fetch_shipped("smollm2-eagle3")


def test_it_is_whole_and_small() -> None:
    config = HeadConfig.from_json(read_config(FOLDER))
    head = build_head(config.kind, config.target, config.options)
    tensors = read_tensors(FOLDER / "model.safetensors")
    kept = tensors.pop("kept")
    head.load_state_dict(tensors)
    assert head.taps == (2, 15, 27) and config.target.vocab == 49152
    assert len(kept) == 8192 and bool((kept[1:] > kept[:-1]).all())
    assert sum(file.stat().st_size for file in FOLDER.glob("*.safetensors")) < 15e6


def test_it_is_the_kind_that_auto_takes() -> None:
    assert read_config(FOLDER)["kind"] == spec.HEAD.partition(":")[0]


def test_it_is_no_model_by_itself() -> None:
    import foretell

    with pytest.raises(ForetellError) as caught:
        foretell.load("smollm2-eagle3")
    assert len(str(caught.value).splitlines()) == 1
