"""A real browser for tests of the console's page: Debian's Chromium, headless."""

import contextlib
import shutil
from collections.abc import Iterator

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

WAIT_MS = 60_000.0
VIEWS = ("overview", "nodes", "network", "contents", "activity")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Raises RuntimeError where there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        raise RuntimeError("tests of the console need a browser: make chromium")
    with sync_playwright() as playwright:
        # Tests run as root in containers, where Chromium's sandbox cannot be had; the pages are the tests' own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page, and all that went wrong on it: errors of scripts, what its policy refused, requests to elsewhere."""

    def __init__(self, browser: Browser, address: str, *, theme: str = "light", width: int = 1280, height: int = 900) -> None:
        self.address = address
        self.wrong: list[str] = []
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if theme == "dark" else "light", timezone_id="UTC"
        )
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.page.on("console", lambda message: self._add(message.text) if message.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self._add(str(error)))
        self.page.on(
            "request", lambda request: None if request.url.startswith((address, "data:")) else self._add(f"asked for {request.url}")
        )

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_error: object) -> None:
        self.context.close()

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

    def violations(self) -> str:
        """What axe has against the page as it is now; empty for nothing."""
        results = Axe().run(self.page)
        return str(results.generate_report()) if results.violations_count else ""

    def _asked(self, url: str) -> None:
        if not url.startswith(self.address):
            self._add(f"asked for {url}")

    def _add(self, text: str) -> None:
        self.wrong.append(text)
