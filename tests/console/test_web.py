"""Promises of web.py and actions.py, by HTTP."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.console.config import ConsoleSettings
from kvstore.console.watch import ClusterWatcher
from kvstore.protocol.audit_lines import line_of
from kvstore.telemetry.http.access import AccessLevel
from tests.console.serving import Clock, HeaderAccess, Served, served, simulated
from tests.console.simulated import Simulated

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def console() -> Iterator[tuple[Served, Simulated, Clock]]:
    with simulated(5, looks=4, dead=(2,)) as found:
        yield found


def ask(served: Served, path: str, told: Any = None, **headers: str) -> Any:
    data = json.dumps(told).encode() if told is not None else None
    kind = {"Content-Type": "application/json"} if told is not None else {}
    request = urllib.request.Request(served.address + path, data, {**kind, **headers})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        body = answer.read()
        return json.loads(body) if answer.headers.get_content_type() == "application/json" else (answer.status, answer.headers, body)


def refused(served: Served, path: str, told: Any = None, **headers: str) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(served, path, told, **headers)
    with error.value as answer:
        return answer.code, json.loads(answer.read())["error"]


def test_page_files_are_local_and_csp_forbids_others(console: tuple[Served, Simulated, Clock]) -> None:
    found, _source, _clock = console
    status, headers, body = ask(found, "/")
    assert (status, headers.get_content_type()) == (200, "text/html")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert b"http://" not in body
    assert b"https://" not in body
    assert b"style=" not in body
    assert ask(found, "/console/main.js")[1].get_content_type() == "text/javascript"
    with pytest.raises(urllib.error.HTTPError, match="304"):
        ask(found, "/", **{"If-None-Match": headers["ETag"]})
    assert refused(found, "/console/other.js") == (404, "the console has no file other.js")
    assert refused(found, "/console/..%2Fweb.py")[0] == 404


def test_state_history_hosts_and_prefixes_are_json(console: tuple[Served, Simulated, Clock]) -> None:
    found, _source, _clock = console
    assert ask(found, "/api/state")["cluster"]["totals"]["nodes"] == 5
    assert len(ask(found, "/api/history?samples=2")["series"]["hit_ratio"]) == 2
    assert len(ask(found, "/api/history?node=node-1&samples=9")["series"]["hits_per_s"]) == 3
    assert [host["node"] for host in ask(found, "/api/hosts?node=node-1&node=none&node=node-3")] == ["node-1", "node-3"]
    assert ask(found, "/api/flows?node=node-1&node=none") == [{"node": "node-1", "links": {}}], "rates are known from the second look on"
    assert refused(found, "/api/flows")[0] == 400
    assert refused(found, "/api/hosts") == (400, "the query names 0 nodes: name 1 to 64")
    told = ask(found, "/api/prefixes?tenant=acme&namespace=x&segments=7")
    assert (len(told["namespaces"]), len(told["segments"])) == (4, 7)
    assert {one["reads_per_s"] for one in told["segments"]} == {0}
    hot = ask(found, "/api/prefixes?tenant=acme&namespace=x&segments=7&by=reads")["segments"]
    assert all(one["subtree_reads_per_s"] >= one["reads_per_s"] > 0 for one in hot)
    assert refused(found, "/api/prefixes?by=age") == (400, "by is 'age': it must be bytes or reads")
    assert refused(found, "/api/prefixes?segments=1001") == (400, "segments is '1001': it must be a whole number up to 1000")
    assert [(one["role"], one["behind"], one["error"] != "") for one in ask(found, "/api/masters")] == [
        ("owner", 0, False),
        ("following", 12, False),
        ("", 0, True),
    ]
    assert [(one["tenant"], one["what"], one["share"]) for one in ask(found, "/api/tenants")] == [
        ("acme", "pins", 0.9444),
        ("beta", "dram_bytes", 0),
    ]
    for samples in ("-1", "1" * 5000):
        assert refused(found, f"/api/history?samples={samples}")[0] == 400
    assert ask(found, "/api/access") == {"access": "admin"}


def test_stream_sends_events_then_state_after_each_poll(console: tuple[Served, Simulated, Clock]) -> None:
    found, source, clock = console
    first = found.watch.events(0)[0]["number"]
    with urllib.request.urlopen(f"{found.address}/api/events?after={first}", timeout=TIMEOUT_S) as stream:
        assert stream.headers.get_content_type() == "text/event-stream"
        seen = [_event(stream) for _ in range(3)]
        assert [name for name, _data in seen] == ["happened", "happened", "state"]
        source.dead = {2, 3}
        clock.now_s += 10
        found.watch.poll()
        name, data = _event(stream)
        assert (name, data["text"]) == ("happened", "node-3 is dead")
        name, data = _event(stream)
        assert (name, data["cluster"]["totals"]["alive"]) == ("state", 3)


def _event(stream: Any) -> tuple[str, Any]:
    name, data, _blank = stream.readline(), stream.readline(), stream.readline()
    return name.decode().removeprefix("event: ").strip(), json.loads(data.removeprefix(b"data: "))


@pytest.mark.parametrize(
    ("name", "told", "done", "text"),
    [
        ("drain", {"node": "node-1"}, ("drain", "node-1", "peers", False), "node-1 is being drained"),
        ("drain", {"node": "node-1", "to": "nvme"}, ("drain", "node-1", "nvme", False), "node-1 is being drained"),
        ("drain", {"node": "node-1", "cancel": True}, ("drain", "node-1", "peers", True), "node-1 accepts blocks again"),
        ("forget", {"node": "node-2"}, ("forget", "node-2"), "node-2 is forgotten"),
        (
            "pin",
            {"tenant": "t", "namespace": "n", "pinned": True},
            ("pin", "t", "n", True),
            "Pinned 1,234 blocks of namespace n of tenant t",
        ),
        ("pin", {"namespace": "n", "pinned": False}, ("pin", "", "n", False), "Unpinned 1,234 blocks of namespace n"),
        (
            "quota",
            {"tenant": "t", "limit": "dram_bytes", "value": " 8GiB "},
            ("set_quota", "t", {"dram_bytes": 8 << 30}),
            "dram_bytes of tenant t is 8GiB",
        ),
        ("quota", {"limit": "pins", "value": "none"}, ("set_quota", "", {"pins": None}), "pins of tenant (none) is none"),
        (
            "quota",
            {"tenant": "t", "limit": "pins", "value": ""},
            ("clear_quota", "t", ["pins"]),
            "pins of tenant t is as in the quotas file",
        ),
        ("remove", {"tenant": "t"}, ("remove", "t", ""), "Removed 1,200 blocks of namespace (none) of tenant t"),
    ],
)
def test_action_is_done_and_audited(console: tuple[Served, Simulated, Clock], name: str, told: Any, done: Any, text: str) -> None:
    found, source, _clock = console
    assert ask(found, f"/api/actions/{name}", told) == {"text": text}
    assert source.done[-1] == done
    found.watch.poll()
    entry = source.entries[-1]
    assert (entry.kind, entry.peer, entry.via) == ("anonymous", "127.0.0.1", "console")
    assert line_of(entry) in [event["text"] for event in found.watch.events(0)]


@pytest.mark.parametrize(
    ("path", "told", "status", "text"),
    [
        ("drain", {}, 400, "'node' is missing or not a string"),
        ("drain", [], 400, "the arguments of an action must be a JSON object, not list"),
        ("drain", {"node": "n", "to": "the moon"}, 400, "drain: 'to' must be one of peers, nvme, and 'cancel' true or false"),
        ("drain", {"node": "n", "cancel": "no"}, 400, "drain: 'to' must be one of peers, nvme, and 'cancel' true or false"),
        ("forget", {"node": "node-0"}, 400, "node 'node-0' is alive: stop it first"),
        ("pin", {"namespace": "n"}, 400, "'pinned' is None: it must be true or false"),
        ("remove", {"tenant": 5}, 400, "'tenant' is missing or not a string"),
        ("quota", {"tenant": "t", "value": "5"}, 400, "'limit' is missing or not a string"),
        ("quota", {"limit": "pins", "value": "8GiB"}, 400, "pins: '8GiB' is no limit; write a whole number from 0 on, or \"none\""),
        ("explode", {}, 404, "no action 'explode': use one of drain, forget, pin, remove, quota"),
    ],
)
def test_bad_actions_say_what_is_wrong(console: tuple[Served, Simulated, Clock], path: str, told: Any, status: int, text: str) -> None:
    assert refused(console[0], f"/api/actions/{path}", told) == (status, text)


@pytest.mark.promise("least-privilege")
def test_other_sites_pages_and_forms_can_do_nothing(console: tuple[Served, Simulated, Clock]) -> None:
    found, source, _clock = console
    before = len(source.done)
    told = {"node": "node-1"}
    assert refused(found, "/api/actions/drain", told, Origin="http://evil.example") == (
        403,
        "requests from pages of other sites are refused",
    )
    assert refused(found, "/api/actions/drain", told, **{"Content-Type": "text/plain"})[0] == 415
    assert refused(found, "/api/state", Host="evil.example")[0] == 401
    for body, charset in ((b"{", "utf-8"), (b"{}", "none"), (b"[" * 5_000, "utf-8"), (b"\xff", "utf-8")):
        headers = {"Content-Type": f"application/json; charset={charset}"}
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(urllib.request.Request(found.address + "/api/actions/drain", body, headers), timeout=TIMEOUT_S)
    assert len(source.done) == before


@pytest.mark.promise("least-privilege")
def test_readers_cannot_act_and_others_cannot_read() -> None:
    clock = Clock()
    source = Simulated(1, clock)
    watch = ClusterWatcher(source, ConsoleSettings(), clock=clock)
    watch.poll()
    with served(source, watch, access_control=HeaderAccess({"Bearer looks": AccessLevel.READ})) as found:
        assert ask(found, "/api/access") == {"access": "none"}
        assert ask(found, "/")[0] == 200
        assert refused(found, "/api/state")[0] == 401
        assert refused(found, "/api/events")[0] == 401
        assert ask(found, "/api/state", Authorization="Bearer looks")["version"] == 1
        assert refused(found, "/api/actions/drain", {"node": "node-0"}, Authorization="Bearer looks")[0] == 401
    assert source.done == []
