"""train/recipes.py: recipes are found, read and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.errors import BadConfig, BadFile, UnknownMethod
from foretell.train import recipes

WRITABLE = st.characters(exclude_categories=["Cs", "Cc"])
VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(WRITABLE),
    st.text(st.sampled_from('"\\\n\té=[]#')),
    st.lists(st.text(WRITABLE), max_size=3),
)


@given(fields=st.dictionaries(st.from_regex(r"[a-z]+(_[a-z]+)*", fullmatch=True), VALUES))
def test_what_is_kept_is_read_again(fields: dict[str, Any]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        recipes.write_recipe(fields, Path(folder))
        assert recipes.read_recipe(Path(folder) / recipes.KEPT) == fields


def test_they_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    assert {"smollm2-eagle3-first", "smollm2-eagle3", "smollm2-draft"} <= {
        *recipes.shipped_recipes()
    }
    assert recipes.find_recipe("smollm2-eagle3") == recipes.FOLDER / "smollm2-eagle3.toml"
    assert recipes.find_recipe(str(tmp_path / "mine.toml")) == tmp_path / "mine.toml"
    with pytest.raises(UnknownMethod, match=r"'smollm2-eagle'; did you mean smollm2-eagle3"):
        recipes.find_recipe("smollm2-eagle")
    with pytest.raises(BadConfig, match=r"a folder; name a \.toml file"):
        recipes.find_recipe(str(tmp_path))


def test_what_is_no_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"gone.toml: cannot be read"):
        recipes.read_recipe(tmp_path / "gone.toml")
    for content in (b"tokens =", b"\xff\xfe", b"a = 1\na = 2"):
        path = tmp_path / "bad.toml"
        path.write_bytes(content)
        with pytest.raises(BadFile, match=r"bad.toml: is no TOML file"):
            recipes.read_recipe(path)
