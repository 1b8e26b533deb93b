"""FSPAD: EAGLE-2's tree on its own network; its exactness is in test_laws.py, its network in
tests/heads.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretell.drafters.heads.eagle2 import Eagle2
from foretell.drafters.heads.fspad import Fspad
from foretell.drafters.heads.networks.folder import build_head, save_head, target_shape
from foretell.errors import BadModel, Unsupported
from foretell.testing.toy import Toy, ToyRecurrent
from tests.drafters.heads.networks.driving import trees
from tests.drafters.heads.networks.test_fspad import TEXT, llama
from tests.drafters.heads.test_eagle2 import TOY

SPECS = ["fspad:depth=2,breadth=2,total=4", "fspad:depth=3,breadth=2,total=3,least=0.2"]


def folder_of(kind: str, where: Path) -> str:
    torch.manual_seed(1)
    save_head(build_head(kind, target_shape(llama())), None, where, llama(), {})
    return str(where)


def test_the_tree_is_that_of_eagle2() -> None:
    for toy in (TOY, Toy(9, seed=4, sharpness=3.0)):
        own, _ = trees(Fspad(depth=3, breadth=3, total=7), toy)
        other, _ = trees(Eagle2(depth=3, breadth=3, total=7), toy)
        assert [(tree.tokens, tree.parents, tree.values) for tree in own] == [
            (tree.tokens, tree.parents, tree.values) for tree in other
        ]
        assert {source for tree in own for source in tree.sources[1:]} == {"fspad"}


def test_it_is_brought_from_its_folder_and_no_other(tmp_path: Path) -> None:
    drafter = Fspad(head=folder_of("fspad", tmp_path / "own"), depth=3, breadth=2, total=4)
    (tree, *_), calls = trees(drafter, llama(), TEXT)  # type: ignore[arg-type]
    assert len(tree) == 5 and calls["head"] >= 3
    with pytest.raises(BadModel, match="is a head for eagle, not for fspad"):
        Fspad(head=folder_of("eagle", tmp_path / "other")).bring({"target": llama()})


def test_a_model_without_states_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="fspad cannot run on recurrent"):
        Fspad().bring({"target": ToyRecurrent()})
