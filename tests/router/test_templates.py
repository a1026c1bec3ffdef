"""Promises of templates.py."""

import pytest

from kvstore.protocol.errors import InvalidArgument
from kvstore.router.templates import chat_prompt


def said(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def test_each_message_is_its_role_and_its_content() -> None:
    prompt = chat_prompt([said("system", "Be brief."), said("user", "Hello")])
    assert prompt == "<|system|>\nBe brief.\n<|user|>\nHello\n<|assistant|>\n"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert chat_prompt([said("user", parts)]) == "<|user|>\none two\n<|assistant|>\n"


def test_the_next_turns_prompt_begins_with_this_ones_and_its_answer() -> None:
    turn = [said("system", "x"), said("user", "question")]
    later = [*turn, said("assistant", "answer"), said("user", "more")]
    assert chat_prompt(later).startswith(chat_prompt(turn) + "answer\n")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages is a list of at least one message"),
        ([], "messages is a list of at least one message"),
        ("text", "messages is a list of at least one message"),
        (["text"], 'messages[0] is an object with "role" and "content"'),
        ([said("user", "x"), said("tool", "x")], "messages[1].role is one of system, developer, user, assistant, not 'tool'"),
        ([{"role": [["user"]], "content": "x"}], "messages[0].role is one of system, developer, user, assistant, not 'list'"),
        ([said("user", None)], "messages[0].content is a text, or a list of text parts"),
        ([said("user", ["x"])], "messages[0].content[0] is not"),
        ([said("user", [{"type": "image_url", "image_url": {}}])], "messages[0].content[0] is not"),
        ([said("user", [{"type": "text", "text": 1}])], "messages[0].content[0] is not"),
    ],
)
def test_what_is_no_chat_of_texts_is_refused_by_name(messages: object, message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        chat_prompt(messages)
    assert str(refused.value).startswith(message)
