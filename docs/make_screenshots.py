"""Creates docs/console/*.png and top.svg: the console and `kvstore top` of a simulated cluster of a thousand nodes. `make screenshots`."""

import io
import sys
from pathlib import Path

from playwright.sync_api import BrowserContext
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvstore.cli.tools.top_screen import ScreenView, screen  # noqa: E402
from kvstore.console.model import ConsoleModel  # noqa: E402
from kvstore.protocol import control_pb2 as pb  # noqa: E402
from tests.console.browser import Watched, chromium  # noqa: E402
from tests.console.serving import Clock, Served, simulated  # noqa: E402
from tests.console.simulated import Simulated  # noqa: E402

FOLDER = ROOT / "docs" / "console"
NODES, LOOKS, WIDTH, HEIGHT = 1000, 100, 1440, 900
NARROW = 400
DAY_S = 86_400
TOP_SIZE = (120, 34)
DRAWN_MS = 400.0


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with simulated(NODES, looks=LOOKS, dead=(12, 500, 501)) as (served, source, clock), chromium() as browser:
        for name, view, theme in (
            ("overview-light", "overview", "light"),
            ("overview-dark", "overview", "dark"),
            ("contents", "contents", "light"),
            ("hottest", "contents", "light"),
            ("network", "network", "dark"),
        ):
            with Watched(browser, served.address, theme=theme, width=WIDTH, height=HEIGHT) as watched:
                page = watched.show(view)
                if name == "hottest":
                    page.get_by_role("button", name="Hottest").click()
                    page.wait_for_selector(".icicle text:has-text('/s')")
                if name == "network":  # rates of NICs need two reports of the nodes
                    page.wait_for_selector(".numa")
                    clock.now_s += 10
                    while not page.locator(".carried:not([hidden])").count():
                        served.watch.poll()
                        page.wait_for_timeout(DRAWN_MS)
                watched.page.wait_for_timeout(DRAWN_MS)
                watched.page.screenshot(path=FOLDER / f"{name}.png")
        with Watched(browser, served.address, width=WIDTH, height=HEIGHT) as watched:
            page = watched.show("nodes")
            page.get_by_role("button", name="node-4", exact=True).click()
            page.wait_for_selector("dialog .numa")
            page.wait_for_timeout(DRAWN_MS)
            page.screenshot(path=FOLDER / "node.png")
        trouble(served, source, clock, browser)
    (FOLDER / "top.svg").write_text(top())


def trouble(served: Served, source: Simulated, clock: Clock, browser: BrowserContext) -> None:
    """Capture same cluster with dead nodes, an etcd without a quorum and a certificate that ends soon: whole, and on a narrow screen."""
    source.role, source.health = "cut off", "etcd has no quorum: 1 of 3 answers; reads continue, puts are not confirmed"
    source.expirations = [pb.Expiration(what="certificate tls_cert", left_s=9.5 * DAY_S)]
    for _ in range(3):
        clock.now_s += 10
        served.watch.poll()
    for name, theme, width in (("trouble", "light", WIDTH), ("trouble-narrow", "dark", NARROW)):
        with Watched(browser, served.address, theme=theme, width=width, height=HEIGHT) as watched:
            page = watched.show()
            page.wait_for_timeout(DRAWN_MS)
            page.screenshot(path=FOLDER / f"{name}.png")


def top() -> str:
    """Return the screen of `kvstore top` as SVG."""
    clock, model, view = Clock(), ConsoleModel(), ScreenView()
    source = Simulated(NODES, clock, dead=(12, 500, 501))
    for _ in range(40):
        view.take(model.document(source.status(), at_s=clock(), wall_s=clock()))
        clock.now_s += 10
    width, height = TOP_SIZE
    console = Console(width=width, height=height, file=io.StringIO(), record=True, force_terminal=True, color_system="truecolor")
    console.print(screen(view, width, height)[0])
    return console.export_svg(title="kvstore top")


if __name__ == "__main__":
    main()
