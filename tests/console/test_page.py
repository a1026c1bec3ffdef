"""Promises of the page, in a real browser: of one node and of a thousand, light and dark, from 360 to 2,560 pixels, by keyboard."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, expect

from kvstore.console import web
from kvstore.console.config import ConsoleSettings
from kvstore.console.watch import ClusterWatcher
from kvstore.protocol.errors import Unavailable
from kvstore.security.authenticator import Authenticator
from kvstore.telemetry.http.access import AccessLevel, OperatorAccess
from kvstore.testing.transfer.awaited import eventually
from tests.client.embedded import embedded
from tests.console.browser import VIEWS, WAIT_MS, Watched, chromium
from tests.console.serving import Clock, HeaderAccess, Served, served, simulated
from tests.console.simulated import Simulated

expect.set_options(timeout=WAIT_MS)
PAGE = Path(web.__file__).parent / "page"
TOKENS = (PAGE / "tokens.css").read_text()
LOOKS = "[...document.querySelectorAll('main *')].map((part) => `${part.tagName} ${part.getAttribute('class')} ${part.dataset.heat}`)"
WIDTHS = (360, 768, 1280, 2560)
LOOK_MS = 250
"""Between looks at a cluster that a page waits for: each one has it draw."""


@pytest.fixture(scope="module")
def browser() -> Iterator[BrowserContext]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def many() -> Iterator[Served]:
    with simulated(1000, looks=4, dead=(12, 500, 501)) as (found, _source, _clock):
        yield found


@pytest.fixture
def few() -> Iterator[tuple[Served, Simulated, Clock]]:
    with simulated(3, looks=30, dead=(2,)) as found:
        yield found


@pytest.fixture(scope="module")
def sixty() -> Iterator[Served]:
    """In all the states that `many` has."""
    with simulated(60, looks=4, dead=(12, 50, 51)) as (found, _source, _clock):
        yield found


@pytest.mark.promise("observable")
@pytest.mark.parametrize("view", [VIEWS[0], *(pytest.param(view, marks=pytest.mark.slow) for view in VIEWS[1:])])
def test_page_thousand_nodes_fit_any_width_accessibly(browser: BrowserContext, many: Served, sixty: Served, view: str) -> None:
    """Accessibility is judged by sixty nodes that look in all the ways in which a thousand do: axe takes a time for each element."""
    with Watched(browser, many.address) as watched:
        page = watched.show(view)
        if view == "overview":
            expect(page.locator(".cell[role=option]")).to_have_count(1000)
        if view == "network":
            expect(page.locator(".host")).to_have_count(12)
        if view == "contents":
            expect(page.locator(".icicle rect").first).to_be_visible()
        looks = set(page.evaluate(LOOKS))
        for width in WIDTHS:
            assert (width, watched.overflow(width), watched.overlapping()) == (width, 0, [])
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
    with Watched(browser, sixty.address) as watched:
        page = watched.show(view)
        page.wait_for_selector(".icicle rect" if view == "contents" else "main .panel")
        eventually(lambda: set(page.evaluate(LOOKS)) >= looks, "all that the view asks for is drawn")
        assert watched.violations() == ""
        page.emulate_media(color_scheme="dark", reduced_motion="reduce")  # axe does not judge colours halfway
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        assert watched.violations() == ""


def test_a_real_clusters_only_node_is_shown(browser: BrowserContext) -> None:
    with embedded() as cluster:
        with cluster.control() as control:
            address = f"http://{control.status().http}"
        with Watched(browser, address) as watched:
            page = watched.show()
            expect(page.locator(".tile", has_text="Nodes alive")).to_contain_text("1of 1")
            expect(page.get_by_role("list", name="State of the cluster")).to_contain_text("No problems")
            for view in VIEWS:
                watched.show(view)
                for width in WIDTHS:
                    assert (view, width, watched.overflow(width), watched.overlapping()) == (view, width, 0, [])
            page.set_viewport_size({"width": 1280, "height": 900})
            watched.show("network")
            expect(page.locator(".host")).to_contain_text("node-0")
            assert watched.violations() == ""


@pytest.mark.promise("observable")
def test_page_shows_owner_of_shards_and_lagging_masters(browser: BrowserContext, few: tuple[Served, Simulated, Clock]) -> None:
    found, _source, _clock = few
    with Watched(browser, found.address) as watched:
        page = watched.show()
        expect(page.locator(".panel", has_text="Owner of all 64 shards")).to_contain_text("master-1:7440, epoch 7")
        rows = page.get_by_role("list", name="Masters").locator("li")
        expect(rows).to_have_count(3)
        expect(rows.nth(1)).to_contain_text("12 blocks behind")
        expect(rows.nth(2)).to_contain_text("it does not answer")


@pytest.mark.promise("observable")
def test_page_shows_what_moved_and_what_leaves_next(browser: BrowserContext, few: tuple[Served, Simulated, Clock]) -> None:
    found, _source, clock = few
    with Watched(browser, found.address) as watched:
        page = watched.show()
        clock.now_s += 10
        panel = page.get_by_role("region", name="What moved, and why")
        for text in ("copied to their home node", "evicted, the home node keeps them", "75.0 % of reads are local"):
            expect(panel).to_contain_text(text)
        expect(panel).to_contain_text("Without a home copy: 1,200 had left the writer's node before")
        page = watched.show("nodes")
        expect(page.locator("tbody tr", has_text="node-1")).to_contain_text("1 min")
        page.get_by_role("button", name="node-0").click()
        expect(page.get_by_role("dialog")).to_contain_text("Evicts next: unread for 1 min, 0.032 hits/s a GiB")
        expect(page.get_by_role("dialog")).to_contain_text(re.compile("Home copies.* sent, .* received"))


def test_partitions_have_their_owners(browser: BrowserContext, few: tuple[Served, Simulated, Clock]) -> None:
    found, source, clock = few
    source.owners = ["master-1", "master-2", "master-3"] * 4
    with Watched(browser, found.address) as watched:
        page = watched.show()
        clock.now_s += 10
        found.watch.poll()
        catalog = page.locator(".panel", has_text="Owners of 12 partitions")
        expect(catalog).to_contain_text("master-1: 4, master-2: 4, master-3: 4")
        expect(catalog).not_to_contain_text("shards")
        source.owners[5] = ""
        clock.now_s += 10
        found.watch.poll()
        expect(page.get_by_role("list", name="State of the cluster")).to_contain_text("No master owns 1 of the 12 partitions")
        assert {width: watched.overflow(width) for width in WIDTHS} == dict.fromkeys(WIDTHS, 0)
        assert watched.violations() == ""


@pytest.mark.promise("observable")
def test_tenants_show_the_limit_that_they_are_nearest_to(browser: BrowserContext, few: tuple[Served, Simulated, Clock]) -> None:
    found, _source, _clock = few
    with Watched(browser, found.address) as watched:
        rows = watched.show("contents").get_by_role("region", name="Table of tenants").locator("tbody tr")
        expect(rows.nth(0)).to_contain_text("94.4 % of pins")
        expect(rows.nth(1)).to_contain_text("0.0 % of DRAM")
        expect(rows.nth(2).locator("[title]")).to_have_attribute("title", "no limit")
        assert watched.violations() == ""


def test_page_namespaces_show_model_weights_and_users(browser: BrowserContext, few: tuple[Served, Simulated, Clock]) -> None:
    found, _source, _clock = few
    with Watched(browser, found.address) as watched:
        rows = watched.show("contents").get_by_role("region", name="Table of namespaces").locator("tbody tr")
        for text in (
            "Llama-3-70B",
            "bfloat16, 16 tokens a block, rank 0 of 8; id 3f2a91c0",
            "@step-7",
            "1 min ago",
            "engine-1, engine-2 and 1 more",
        ):
            expect(rows.nth(0)).to_contain_text(text)
        expect(rows.nth(1)).to_contain_text("base (retired)")
        assert watched.violations() == ""


def test_what_nics_carry_is_shown_while_the_network_is_looked_at(browser: BrowserContext) -> None:
    with simulated(2, looks=2) as (found, _source, clock), Watched(browser, found.address) as watched:
        with watched.page.expect_response(re.compile("/api/flows")):
            page = watched.show("network")
        shown = page.locator(".host").first.locator(".carried:not([hidden])")
        assert shown.count() == 0
        clock.now_s += 10

        def is_shown() -> bool:
            found.watch.poll()
            page.wait_for_timeout(LOOK_MS)
            return shown.count() == 4

        eventually(is_shown, "what each NIC carries, a look or some after the first")
        expect(page.locator('.carried[data-nic="mlx5_1"]').first).to_contain_text("in 9.31 GiB/s, out 16.8 GiB/s")
        assert {width: watched.overflow(width) for width in WIDTHS} == dict.fromkeys(WIDTHS, 0)
        assert watched.violations() == ""


def test_an_empty_cluster_says_what_to_do(browser: BrowserContext) -> None:
    with simulated(0, looks=2) as (found, _source, _clock), Watched(browser, found.address) as watched:
        expect(watched.show().get_by_role("list", name="State of the cluster")).to_contain_text("No node has joined yet")
        expect(watched.show("nodes").locator("main")).to_contain_text("kvstore-node --master HOST:PORT")
        expect(watched.show("network").locator("main")).to_contain_text("No node has joined yet")
        expect(watched.show("contents").locator("main")).to_contain_text("Nothing is held yet")
        assert watched.violations() == ""


def test_whom_the_console_does_not_hear_is_said_in_each_view(browser: BrowserContext) -> None:
    with simulated(1, looks=2) as (found, source, _clock), Watched(browser, found.address) as watched:
        source.missing = ("master-2 at master-2:7440, which owns 4 of the 12 partitions, does not answer",)
        found.watch.poll()
        for view in VIEWS:
            expect(watched.show(view).locator("main .notes:not([hidden])")).to_contain_text("4 of the 12 partitions, does not answer")
        watched.page.keyboard.press("1")
        expect(watched.page.locator("main .notes:not([hidden])")).to_have_count(1)
        expect(watched.page.locator(".notes summary")).to_have_count(0)
        assert watched.violations() == ""


def test_what_happens_is_seen_without_a_reload(browser: BrowserContext, few: tuple[Served, Simulated, Clock]) -> None:
    found, source, clock = few
    with Watched(browser, found.address) as watched:
        page = watched.show()
        expect(page.get_by_role("list", name="State of the cluster")).to_contain_text("node-2 is dead")
        source.dead, source.health = {1, 2}, "etcd is full"
        clock.now_s += 10
        found.watch.poll()
        expect(page.locator(".notes li.error", has_text="Catalog: etcd is full")).to_be_visible()
        expect(page.locator(".happened")).to_contain_text("node-1 is dead")
        page = watched.show("activity")
        page.get_by_role("button", name="Errors").click()
        expect(page.locator(".happened li")).to_have_count(2)
        page.get_by_label("Filter events by text").fill("nothing like that")
        expect(page.locator(".happened")).to_contain_text("No such events")


def test_nodes_are_filtered_sorted_and_turned(browser: BrowserContext, many: Served) -> None:
    with Watched(browser, many.address) as watched:
        page = watched.show("nodes")
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(50)
        expect(rows.first).to_contain_text("node-0")
        page.get_by_role("button", name="Next").click()
        expect(rows.first).to_contain_text("node-50")
        page.get_by_role("button", name="State").click()
        expect(rows.first).to_contain_text("node-12")
        page.get_by_label("Only nodes in this state").select_option("dead")
        expect(rows).to_have_count(3)
        page.get_by_label("Only nodes in this state").select_option("")
        page.get_by_label("Filter nodes").fill("node-77")
        expect(rows).to_have_count(11)
        page.get_by_label("Filter nodes").fill("none is so")
        expect(page.locator("main")).to_contain_text("No node matches")


@pytest.mark.promise("least-privilege")
def test_actions_ask_first_and_do_what_they_say(browser: BrowserContext, few: tuple[Served, Simulated, Clock]) -> None:
    found, source, clock = few
    with Watched(browser, found.address) as watched:
        page = watched.show("nodes")
        page.get_by_role("button", name="node-1", exact=True).click()
        expect(page.get_by_role("dialog")).to_contain_text("The last hour")
        assert watched.violations() == ""
        page.get_by_role("button", name="Drain", exact=True).click()
        page.get_by_role("button", name="Cancel").click()
        assert source.done == []
        page.get_by_role("button", name="Drain", exact=True).click()
        page.get_by_role("dialog", name="Drain node-1?").get_by_role("button", name="Drain", exact=True).click()
        expect(page.locator("#toast")).to_contain_text(re.compile("drain node-1|node-1 is being drained"))
        clock.now_s += 10
        found.watch.poll()
        expect(page.get_by_role("button", name="End the drain")).to_be_visible()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="node-2", exact=True).click()
        page.get_by_role("button", name="Forget", exact=True).click()
        forget = page.get_by_role("dialog", name="Forget node-2?")
        expect(forget.get_by_role("button", name="Forget")).to_be_disabled()
        forget.get_by_label("Type node-2").fill("node-2")
        forget.get_by_role("button", name="Forget").click()
        expect(page.locator("#toast")).to_contain_text(re.compile("node-2 (is )?forgotten"))
        page = watched.show("contents")
        page.get_by_role("button", name="Remove demo").click()
        page.get_by_label("Type demo").fill("demo")
        page.get_by_role("dialog").get_by_role("button", name="Remove").click()
        expect(page.locator("#toast")).to_contain_text("removed 1,200 blocks of namespace demo", ignore_case=True)
        page.get_by_role("button", name=re.compile("^Pin Qwen3-32B")).click()
        page.get_by_role("dialog").get_by_role("button", name="Pin").click()
        expect(page.locator("#toast")).to_contain_text("pinned 1,234 blocks", ignore_case=True)
        page.get_by_role("button", name="Change the quota of beta").click()
        assert watched.violations() == ""
        expect(page.get_by_role("dialog")).to_contain_text("Overrides the quotas file. Leave empty to remove. Lowering it evicts")
        page.get_by_label("Limit").select_option("DRAM")
        page.get_by_label("New value").fill("8GiB")
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Change the quota of beta").click()
        page.get_by_label("Limit").select_option("pins")
        page.get_by_label("New value").fill("5")
        page.get_by_role("dialog", name="Change the quota of beta?").get_by_role("button", name="Change").click()
        expect(page.locator("#toast")).to_contain_text(re.compile("pins of tenant beta(:| is) 5"))
        assert [done[0] for done in source.done] == ["drain", "forget", "remove", "pin", "set_quota"]
        assert source.done[-1] == ("set_quota", "beta", {"pins": 5})


def test_the_keyboard_reaches_all(browser: BrowserContext, few: tuple[Served, Simulated, Clock]) -> None:
    found, _source, _clock = few
    with Watched(browser, found.address) as watched:
        page = watched.show()
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        page.keyboard.press("2")
        expect(page).to_have_url(re.compile("#nodes$"))
        page.keyboard.press("/")
        expect(page.get_by_label("Filter nodes")).to_be_focused()
        page.get_by_label("Filter nodes").blur()
        page.get_by_role("link", name="Skip to the content").focus()
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile("#main$"))
        expect(page.get_by_label("Filter nodes")).to_be_visible()
        page.evaluate(
            "for (const key of ['1', '2', '/']) document.body.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }))"
        )
        expect(page.get_by_label("Filter nodes")).to_be_focused()
        page.get_by_label("Filter nodes").blur()
        page.keyboard.press("?")
        expect(page.get_by_role("dialog")).to_contain_text("views, from left to right")
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        page.keyboard.press("1")
        page.get_by_role("listbox", name="Nodes").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator(".cell.active")).to_contain_text("node-1")
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog", name="Node node-1")).to_be_visible()


def test_page_theme_follows_system_until_chosen(browser: BrowserContext, few: tuple[Served, Simulated, Clock]) -> None:
    found, _source, _clock = few
    with Watched(browser, found.address, theme="dark") as watched:
        page = watched.show()
        theme = "document.documentElement.dataset.theme"
        assert page.evaluate(theme) == "dark"
        page.locator("#theme").click()
        assert page.evaluate(theme) == "light"
        page.reload()
        page.wait_for_selector("main .panel")
        assert page.evaluate(theme) == "light"


@pytest.mark.promise("observable")
def test_page_shows_unreachable_cluster_and_data_age(browser: BrowserContext) -> None:
    with simulated(1, looks=3) as (found, source, _clock), Watched(browser, found.address, refused="ERR_FAILED") as watched:
        page = watched.show()
        expect(page.locator("#live")).to_have_text("Live")
        source.failure = Unavailable("no master answers")
        found.watch.poll()
        expect(page.get_by_role("list", name="State of the cluster")).to_contain_text("The cluster does not answer: no master answers")
        page.route("**/api/**", lambda route: route.abort())
        page.reload()
        expect(page.locator("#loading")).to_contain_text("The console does not answer")
        page.unroute("**/api/**")
        source.failure = None
        found.watch.poll()
        expect(page.locator("#live")).to_have_text("Live")
        expect(page.locator(".tile").first).to_be_visible()


def test_page_asks_for_token_and_hides_actions_from_readers(browser: BrowserContext) -> None:
    clock = Clock()
    source = Simulated(1, clock)
    watch = ClusterWatcher(source, ConsoleSettings(), clock=clock)
    watch.poll()
    accesses = HeaderAccess({"Bearer looks": AccessLevel.READ, "Bearer operates": AccessLevel.ADMIN})
    with served(source, watch, access_control=accesses) as found:
        for token, buttons in (("looks", 0), ("operates", 1)):
            with Watched(browser, found.address, refused="401") as watched:
                watched.page.goto(found.address)
                expect(watched.page.get_by_role("dialog")).to_contain_text("This cluster needs a token")
                expect(watched.page.locator("#live")).to_have_text("Needs a token")
                expect(watched.page.locator(".notes li, .refused")).to_have_count(0)
                watched.page.get_by_role("textbox").fill(token)
                watched.page.get_by_role("button", name="Continue").click()
                page = watched.show("nodes")
                page.get_by_role("button", name="node-0", exact=True).click()
                expect(page.get_by_role("dialog")).to_contain_text("10.1.0.1:7450")
                expect(page.get_by_role("button", name="Drain", exact=True)).to_have_count(buttons)


def test_page_reports_refused_token_not_lost_connection(browser: BrowserContext, tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text('[tenants]\nred = "tenants"\n[nodes]\n"*" = "nodes"\n[admins]\nops = "operators"\n')
    clock = Clock()
    source = Simulated(1, clock)
    watch = ClusterWatcher(source, ConsoleSettings(), clock=clock)
    watch.poll()
    with (
        served(source, watch, access_control=OperatorAccess(Authenticator(str(file)))) as found,
        Watched(browser, found.address, refused="401") as watched,
    ):
        page = watched.page
        page.goto(found.address)
        for token, why in (
            ("guess", "That token is not known"),
            ("tenants", "That token is a tenant's; the console needs an operator's"),
        ):
            page.get_by_role("textbox").fill(token)
            page.get_by_role("button", name="Continue").click()
            expect(page.get_by_role("alert")).to_have_text(why)
            expect(page.locator("#live")).to_have_text("Needs a token")
        assert watched.violations() == ""
        page.get_by_role("textbox").fill("operators")
        page.get_by_role("button", name="Continue").click()
        expect(page.locator("#live")).to_have_text("Live")


def test_a_banner_has_since_when_what_to_do_and_a_link(browser: BrowserContext, few: tuple[Served, Simulated, Clock]) -> None:
    found, source, clock = few
    with Watched(browser, found.address) as watched:
        page = watched.show()
        dead = page.locator(".notes li", has_text="node-2 is dead")
        expect(dead).to_contain_text("since ")
        expect(dead).to_contain_text("forget it if it will not return")
        source.health = "etcd has no quorum: " + "raw text of a program, " * 12
        clock.now_s += 10
        found.watch.poll()
        catalog = page.locator(".notes li", has_text="etcd has no quorum")
        expect(catalog).to_contain_text("etcdctl endpoint health")
        expect(catalog.locator("details p")).not_to_be_visible()
        catalog.locator("summary").click()
        clock.now_s += 10
        found.watch.poll()
        expect(page.locator(".tile").first).to_be_visible()
        expect(catalog.locator("details p")).to_be_visible()
        assert {width: watched.overflow(width) for width in (400, *WIDTHS)} == dict.fromkeys((400, *WIDTHS), 0)
        assert watched.violations() == ""
        dead.get_by_role("link").click()
        expect(page.locator("tbody tr")).to_have_count(1)
        expect(page.locator("tbody tr")).to_contain_text("node-2")
