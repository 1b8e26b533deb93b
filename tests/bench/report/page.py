"""Reads a page, and checks that it is well-formed."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that every tag is closed in order; keeps the texts."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, f"{self.open} are not closed"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.open += [tag] * (tag not in VOID)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
