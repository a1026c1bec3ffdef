"""docs/protocol.md names every message, field, limit and error as the code has them."""

import re
from pathlib import Path

import pytest

from kvstore.protocol import frames
from kvstore.protocol.errors import BY_CODE, KVStoreError, grpc_status
from kvstore.protocol.message import Message
from kvstore.protocol.messages import MESSAGES, REPLIES

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert match, f"docs/protocol.md has no section {title!r}"
    return match[1]


@pytest.mark.parametrize("kind", MESSAGES.values(), ids=lambda kind: kind.__name__)
def test_doc_has_each_message_with_fields_in_wire_order(kind: type[Message]) -> None:
    rows = re.findall(r"^\| (\w+) \| (\w+) \| .+ \|$", section(f"{kind.TYPE} {kind.__name__}"), re.MULTILINE)
    assert tuple(row for row in rows if row != ("field", "kind")) == kind.FORM


def test_the_document_has_no_message_that_is_not_there() -> None:
    assert {int(number) for number in re.findall(r"^### (\d+) \w+$", DOCUMENT, re.MULTILINE)} == set(MESSAGES)


def test_the_document_lists_the_answers() -> None:
    listed = re.search(r"Answers are the types:(.*?)\.", section("A frame"), re.DOTALL)
    assert listed
    assert {int(number) for number in re.findall(r"\d+", listed[1])} == REPLIES


def test_the_document_has_every_kind_of_field() -> None:
    kinds = {column for kind in MESSAGES.values() for _, column in kind.FORM}
    for kind in kinds:
        assert re.search(rf"^\| ([\w, ]+, )?{kind}(, [\w, ]+)? \|", section("Bodies"), re.MULTILINE), kind


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=lambda kind: kind.__name__)
def test_doc_has_each_error_with_code_and_grpc_status(kind: type[KVStoreError]) -> None:
    assert f"| {kind.code} | {kind.__name__} | {grpc_status(kind(''))} |" in section("Errors")


@pytest.mark.parametrize(
    "limit",
    [
        "MAX_BODY_BYTES",
        "MAX_PAYLOAD_BYTES",
        "MAX_KEY_BYTES",
        "MAX_VALUE_BYTES",
        "MAX_BATCH",
        "MAX_COUNT",
        "MAX_BLOB_BYTES",
        "MAX_DEADLINE_MS",
    ],
)
def test_the_document_has_each_limit(limit: str) -> None:
    assert re.search(rf"\b{getattr(frames, limit)}\b", section("Limits"))


def test_the_document_is_of_this_version() -> None:
    assert f"Protocol version: **{frames.VERSION}**" in DOCUMENT
