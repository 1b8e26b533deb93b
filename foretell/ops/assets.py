"""Where the files are that come with foretell: models, heads, prompts and texts."""

from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).parents[1] / "assets"
