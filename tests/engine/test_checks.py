from __future__ import annotations

from typing import Any

import pytest
import torch

import foretell
from foretell.engine.engine import Engine
from foretell.errors import BadConfig


def test_what_is_no_adapter_is_told_what_it_lacks() -> None:
    model: Any = torch.nn.Linear(2, 2)
    with pytest.raises(BadConfig, match=r"is a Linear without name, vocab.*foretell\.wrap"):
        Engine({"target": model})
    with pytest.raises(BadConfig, match=r"wrap: Linear is no model of transformers"):
        foretell.wrap(model)
    with pytest.raises(BadConfig, match="load: takes a name or a folder, not a Linear"):
        foretell.load(model)
