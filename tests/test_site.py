"""The site works from disk and needs nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

from selenium.webdriver.support.wait import WebDriverWait

from tests.serve.browser import PATIENCE, chromium

ROOT = Path(__file__).resolve().parent.parent
SHIM = "javascripts/iframe-worker.js"


def test_the_search_of_the_site_is_complete_offline() -> None:
    """The plugin's own script is fetched from elsewhere unless another of this name is there."""
    site = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert "plugins: [search, offline]" in site and f"polyfills: [{SHIM}]" in site
    assert (ROOT / "docs" / SHIM).is_file() and "font: false" in site
    for css in re.findall(r"extra_css: \[(.+)\]", site):
        assert (ROOT / "docs" / css).is_file() and "url(" not in (ROOT / "docs" / css).read_text()


def test_from_disk_a_worker_runs_in_a_frame(tmp_path: Path) -> None:
    script = (ROOT / "docs" / SHIM).read_text("utf-8")
    (tmp_path / "shim.js").write_text(script, "utf-8")
    (tmp_path / "worker.js").write_text("self.onmessage = (e) => self.postMessage(e.data + 1);")
    (tmp_path / "page.html").write_text(
        "<script src=shim.js></script><body><script>const w = new Worker('worker.js');"
        "w.onmessage = (e) => { document.title = String(e.data); w.terminate(); };"
        "w.postMessage(41);</script>"
    )
    with chromium(tmp_path / "profile") as browser:
        browser.get((tmp_path / "page.html").as_uri())
        WebDriverWait(browser, PATIENCE).until(lambda it: it.title == "42")
        assert not browser.find_elements("tag name", "iframe"), "it ends with the worker"
