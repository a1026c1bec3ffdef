"""Messages of a chat to one prompt, by a plain template:

    <|ROLE|>
    CONTENT
    ... for each message, and at the end
    <|assistant|>

Each prompt so begins with the one of the turn before, answer included: its blocks are found again. It is no model's own template: for
that, apply it in the client and send the token ids to /v1/completions. Content that looks like a mark is not told from one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvstore.protocol.errors import InvalidArgument

ROLES: Final = ("system", "developer", "user", "assistant")


def chat_prompt(messages: object) -> str:
    """Raises InvalidArgument naming the message that is not {"role": ROLE, "content": text or a list of text parts}."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidArgument("messages is a list of at least one message")
    turns = [_turn(message, f"messages[{index}]") for index, message in enumerate(messages)]
    return "".join(turns) + "<|assistant|>\n"


def _turn(message: object, name: str) -> str:
    if not isinstance(message, Mapping):
        raise InvalidArgument(f'{name} is an object with "role" and "content"')
    role = message.get("role")
    if role not in ROLES:
        raise InvalidArgument(f"{name}.role is one of {', '.join(ROLES)}, not {role if isinstance(role, str) else type(role).__name__!r}")
    return f"<|{role}|>\n{_content(message.get('content'), f'{name}.content')}\n"


def _content(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument(f"{name} is a text, or a list of text parts")
    return "".join(_part(part, f"{name}[{index}]") for index, part in enumerate(content))


def _part(part: Any, name: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidArgument(f'{name} is not {{"type": "text", "text": TEXT}}: only text is served')
    return str(part["text"])
