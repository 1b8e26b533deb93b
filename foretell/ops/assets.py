"""Where the files are that come with foretell.

Prompts, texts, recipes and tables are in this package. Models, heads and what else was trained are
a distribution of their own, `foretell-models`, that is built from the same repository: they lie in
the checkout, or where pip installed them, or in the cache folder if they were fetched.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from foretell.ops.files import cache_folder

ASSETS = Path(__file__).parents[1] / "assets"
DISTRIBUTION = "foretell-models"
MODULE = "foretell_models"  # the package in it
INSTALL = "pip install 'foretell[models]', or ./models in a clone"


def shipped_files(pattern: str) -> list[Path]:
    """Files of `foretell-models` that match a pattern such as `*/config.json`, if it is here."""
    return [path for folder in model_folders() for path in sorted(folder.glob(pattern))]


def shipped_folder(name: str) -> Path | None:
    """The folder of this name in `foretell-models`, if it is here."""
    return next((folder / name for folder in model_folders() if (folder / name).is_dir()), None)


def model_folders() -> list[Path]:
    """The folder that holds what ships, if it is here: none or one."""
    package_spec = importlib.util.find_spec(MODULE)
    installed_folders = list(package_spec.submodule_search_locations or ()) if package_spec else []
    checkout = Path(__file__).parents[2] / "models" / MODULE
    candidate_folders = [checkout, *map(Path, installed_folders), fetched_models()]
    return [folder for folder in candidate_folders if folder.is_dir()][:1]


def fetched_models() -> Path:
    """The folder that `foretell-models` is put into when a name of it is used first."""
    return cache_folder() / "models" / MODULE


def hint_if_missing() -> str:
    """An addition to the cure where nothing ships for a model; "": all that ships is here."""
    return "" if model_folders() else f"; what ships is not here: {INSTALL}"
