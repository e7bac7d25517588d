"""A real browser for tests of pages: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.patience import patience

CHROMIUM = shutil.which("chromium")

#: Of a test that opens pages.
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")

# The background colours of a page of ours, by the scheme of the browser.
BACKGROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 23, 27)"}


@contextmanager
def open_browser() -> Iterator[Any]:
    """A browser for all pages of a test."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            # In a container /dev/shm may be small, and root has no sandbox.
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
            timeout=1000 * patience(60),
        )
        try:
            yield browser
        finally:
            browser.close()


def new_view(browser: Any, width: int, scheme: str) -> Any:
    """A page without an address yet, `width` pixels wide, in the "light" or the "dark"."""
    view = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    view.set_default_timeout(1000 * patience(30))
    return view


def background(view: Any) -> str:
    """The colour behind everything."""
    colour: str = view.evaluate("getComputedStyle(document.body).backgroundColor")
    return colour
