"""Arguments of setup in both forms."""

from typing import Any

import pytest

from kvstore.engines.mooncake.setup import DEFAULT_MASTER, RETRIES, SetupArguments, of_arguments, of_dictionary

GOOD = {"local_hostname": "h", "metadata_server": "P2PHANDSHAKE"}
REFUSED: list[dict[str, Any]] = [
    *({"local_hostname": "h"}, {"metadata_server": "m"}, {**GOOD, "tenant_id": "a\0b"}, {**GOOD, "client_http_port": "x"}),
    *({**GOOD, "global_segment_size": size} for size in ("50%", "1", "some", "-1", "16MiB", "")),
]


@pytest.mark.parametrize(("size", "can_stage"), [("16MB", True), (" 1.5 gb", True), ("1e7", True), (0, False), ("0", False), (2048, True)])
def test_sizes_are_read_as_mooncake_reads_them(size: Any, *, can_stage: bool) -> None:
    found = of_dictionary({**GOOD, "local_buffer_size": size, "no_such_entry": 1})
    assert found == SetupArguments("h", DEFAULT_MASTER, "default", can_stage)


@pytest.mark.parametrize("config", REFUSED)
def test_dictionary_that_mooncake_refuses_is_none(config: dict[str, Any]) -> None:
    assert of_dictionary(config) is None


def test_arguments_are_all_needed() -> None:
    assert of_arguments("h", "", 0, 1, "tcp", "", "m:1", tenant_id="t") == SetupArguments("h", "m:1", "t", True)
    assert of_arguments("", "", 0, 1, "tcp", "", "m:1") is None
    for arguments in (("h",), ("h", "", "16MB", 1, "tcp", "", "m:1"), ("h", "", -1, 1, "tcp", "", "m:1")):
        with pytest.raises(TypeError):
            of_arguments(*arguments)


def test_host_with_a_port_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [SetupArguments(host, "", "", True).attempts for host in ("h:1", "h")] == [1, 20]
    monkeypatch.setenv(RETRIES, "3")
    assert SetupArguments("h", "", "", True).attempts == 3
    monkeypatch.setenv(RETRIES, "many")
    assert SetupArguments("h", "", "", True).attempts == 20
