"""A real browser for tests of the console's page: Debian's Chromium, headless."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Final

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import BrowserContext, Page, sync_playwright

WAIT_MS = 60_000.0
VIEWS = ("overview", "nodes", "network", "contents", "activity")
ONE_PROCESS = ("--renderer-process-limit=1", "--disable-site-isolation-trials")
"""Pages share the process that draws them: to start one for each, and one in reserve, takes three times as long as a page itself."""

OVERLAPPING: Final = """() => {
  const shown = [];
  for (const part of document.querySelectorAll("header *, nav *, main *")) {
    if (part.closest(".visually-hidden") || !part.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true })) continue;
    for (const text of part.childNodes) {
      if (text.nodeType !== Node.TEXT_NODE || !text.textContent.trim()) continue;
      const range = document.createRange();
      range.selectNodeContents(text);
      for (const box of range.getClientRects()) if (box.width > 1 && box.height > 1) shown.push([box, part, text.textContent.trim()]);
    }
  }
  const found = [];
  for (const [at, [a, part, text]] of shown.entries())
    for (const [b, other, more] of shown.slice(at + 1)) {
      const width = Math.min(a.right, b.right) - Math.max(a.left, b.left), height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (part !== other && width > 2 && height > 3) found.push(`${text} | ${more}`);
    }
  return found;
}"""
"""In the page: pairs of texts whose boxes share more than their edges."""


@contextlib.contextmanager
def chromium() -> Iterator[BrowserContext]:
    """Its pages share a context; Watched keeps them apart. Raises RuntimeError where there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        raise RuntimeError("tests of the console need a browser: make chromium")
    with sync_playwright() as playwright:
        # Tests run as root in containers, where Chromium's sandbox cannot be had; the pages are the tests' own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage", *ONE_PROCESS])
        try:
            context = browser.new_context(timezone_id="UTC")
            context.new_page()  # stays: with the last page its process would go
            yield context
        finally:
            browser.close()


class Watched:
    """A page. At its end nothing has gone wrong on it: no error of a script, nothing its policy refused, no request to elsewhere."""

    def __init__(
        self, browser: BrowserContext, address: str, *, theme: str = "light", width: int = 1280, height: int = 900, refused: str = "no text"
    ) -> None:
        """`refused`: of the messages, those with this in them are not wrong."""
        self._refused = refused
        self.address = address
        self.wrong: list[str] = []
        self.page: Page = browser.new_page()
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
        self.page.set_default_timeout(WAIT_MS)
        self.page.on("console", lambda message: self._add(message.text) if message.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self._add(str(error)))
        self.page.on(
            "request", lambda request: None if request.url.startswith((address, "data:")) else self._add(f"asked for {request.url}")
        )

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self.page.evaluate("localStorage.clear()")  # the next server may have this one's port
        self.page.close()
        assert kind is not None or [text for text in self.wrong if self._refused not in text] == []

    def show(self, view: str = "overview") -> Page:
        """The page with this view, drawn."""
        self.page.goto(f"{self.address}/#{view}")
        self.page.wait_for_selector(f'.views a[data-view="{view}"][aria-current]')
        self.page.wait_for_selector("main .panel")
        return self.page

    def overflow(self, width: int) -> int:
        """By how many pixels the page is wider than a window of this width."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        found: int = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        return found

    def overlapping(self) -> list[str]:
        """Texts that lie on one another, or would be read as if they did."""
        found: list[str] = self.page.evaluate(OVERLAPPING)
        return found

    def violations(self) -> str:
        """Return axe's report of accessibility violations in the current page; empty if it finds none."""
        results = Axe().run(self.page)
        return str(results.generate_report()) if results.violations_count else ""

    def _add(self, text: str) -> None:
        self.wrong.append(text)
