"""Kinds of requests, of which a router's answers are compared with the engine's."""

from typing import Any, Final

COMPLETIONS, CHAT, EMBEDDINGS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses"
HI: Final = {"messages": [{"role": "user", "content": "How is the weather in Oslo? Answer in one word, please."}], "max_tokens": 12}
PROMPT: Final = {"prompt": "def joined(chunks: list) -> str:\n    return ", "max_tokens": 12}
CITY: Final = {"type": "string", "maxLength": 8}
SCHEMA: Final = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
WEATHER: Final = {"type": "function", "function": {"name": "weather", "description": "The weather of a city", "parameters": SCHEMA}}
TIME: Final = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
CALL: Final = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
USED: Final = [
    *HI["messages"],  # type: ignore[misc]
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "rain"}'},
]
IMAGE: Final = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
STREAM: Final = {"stream": True}
USAGE: Final = {"stream": True, "stream_options": {"include_usage": True}}
NAMED: Final = {"type": "function", "function": {"name": "weather"}}

PREFIX: Final = "prefix"
KINDS: Final[dict[str, tuple[str, dict[str, Any], str]]] = {
    # name: path, members beside model and temperature, what x-kvstore-routed-by says
    "text": (COMPLETIONS, PROMPT, PREFIX),
    "token ids": (COMPLETIONS, {"prompt": list(range(5, 80)), "max_tokens": 12}, PREFIX),
    "list of one text": (COMPLETIONS, {**PROMPT, "prompt": [PROMPT["prompt"]]}, PREFIX),
    "several prompts": (COMPLETIONS, {**PROMPT, "prompt": ["one", "two"]}, "load; several_prompts"),
    "completion n": (COMPLETIONS, {**PROMPT, "n": 2}, PREFIX),
    "completion stream": (COMPLETIONS, {**PROMPT, **STREAM}, PREFIX),
    "completion usage": (COMPLETIONS, {**PROMPT, **USAGE}, PREFIX),
    "completion logprobs": (COMPLETIONS, {**PROMPT, "logprobs": 2}, PREFIX),
    "completion echo": (COMPLETIONS, {**PROMPT, "echo": True, "logprobs": 1}, PREFIX),
    "completion prompt logprobs": (COMPLETIONS, {**PROMPT, "prompt_logprobs": 1}, PREFIX),
    "completion default length": (COMPLETIONS, {"prompt": "def "}, PREFIX),
    "completion stop": (COMPLETIONS, {**PROMPT, "stop": ["e", "t"], "include_stop_str_in_output": True}, PREFIX),
    "completion token ids": (COMPLETIONS, {**PROMPT, "return_token_ids": True}, PREFIX),
    "completion min tokens": (COMPLETIONS, {**PROMPT, "min_tokens": 6, "ignore_eos": True, "seed": 1}, PREFIX),
    "completion unknown member": (COMPLETIONS, {**PROMPT, "novel": {"a": [1]}}, PREFIX),
    "completion without special tokens": (COMPLETIONS, {**PROMPT, "add_special_tokens": False}, PREFIX),
    "completion truncated": (COMPLETIONS, {**PROMPT, "truncate_prompt_tokens": 5}, "load; member"),
    "completion suffix": (COMPLETIONS, {**PROMPT, "suffix": "x"}, "load; member"),
    "completion too long": (COMPLETIONS, {**PROMPT, "max_tokens": 100_000}, PREFIX),
    "completion bad temperature": (COMPLETIONS, {**PROMPT, "temperature": -1}, PREFIX),
    "completion bad prompt": (COMPLETIONS, {"prompt": {"a": 1}}, "load; tokenize"),
    "completion no prompt": (COMPLETIONS, {}, "load; tokenize"),
    "completion salt": (COMPLETIONS, {**PROMPT, "cache_salt": "salt"}, "load; salt"),
    "chat": (CHAT, HI, PREFIX),
    "chat max completion tokens": (CHAT, {"messages": HI["messages"], "max_completion_tokens": 5}, PREFIX),
    "chat stream": (CHAT, {**HI, **STREAM}, PREFIX),
    "chat usage": (CHAT, {**HI, **USAGE}, PREFIX),
    "chat n": (CHAT, {**HI, "n": 3}, PREFIX),
    "chat n stream": (CHAT, {**HI, "n": 2, **USAGE}, PREFIX),
    "chat logprobs": (CHAT, {**HI, "logprobs": True, "top_logprobs": 3}, PREFIX),
    "chat logprobs stream": (CHAT, {**HI, "logprobs": True, "top_logprobs": 2, **STREAM}, PREFIX),
    "chat prompt logprobs": (CHAT, {**HI, "prompt_logprobs": 1}, PREFIX),
    "chat parts": (CHAT, {**HI, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, PREFIX),
    "chat developer": (CHAT, {**HI, "messages": [{"role": "developer", "content": "Be short."}, *USED]}, PREFIX),
    "tools": (CHAT, {**HI, "tools": [WEATHER, TIME]}, PREFIX),
    "tools none": (CHAT, {**HI, "tools": [WEATHER], "tool_choice": "none"}, PREFIX),
    "tools required": (CHAT, {**HI, "max_tokens": 200, "tools": [WEATHER], "tool_choice": "required"}, PREFIX),
    "tools required stream": (CHAT, {**HI, "max_tokens": 200, "tools": [WEATHER], "tool_choice": "required", **USAGE}, PREFIX),
    "tool named": (CHAT, {**HI, "max_tokens": 200, "tools": [WEATHER, TIME], "tool_choice": NAMED}, PREFIX),
    "tool named stream": (CHAT, {**HI, "max_tokens": 200, "tools": [WEATHER], "tool_choice": NAMED, **STREAM}, PREFIX),
    "tools one at a time": (CHAT, {**HI, "tools": [WEATHER], "parallel_tool_calls": False}, PREFIX),
    "tool answer": (CHAT, {**HI, "messages": USED, "tools": [WEATHER]}, PREFIX),
    "json object": (CHAT, {**HI, "response_format": {"type": "json_object"}}, PREFIX),
    "json schema": (CHAT, {**HI, "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}}, PREFIX),
    "template arguments": (CHAT, {**HI, "chat_template_kwargs": {"style": "plain"}}, PREFIX),
    "no generation prompt": (CHAT, {**HI, "add_generation_prompt": False}, "load; member"),
    "continued message": (
        CHAT,
        {
            **HI,
            "messages": [*HI["messages"], {"role": "assistant", "content": "It is"}],  # type: ignore[misc]
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        "load; member",
    ),
    "chat store": (CHAT, {**HI, "store": True, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto"}, PREFIX),
    "chat salt": (CHAT, {**HI, "cache_salt": "salt"}, "load; salt"),
    "chat reasoning": (CHAT, {**HI, "messages": [*USED, {"role": "assistant", "content": "x", "reasoning_content": "Hm."}, *USED]}, PREFIX),
    "chat reasoning effort": (CHAT, {**HI, "reasoning_effort": "low"}, "load; member"),
    "chat image": (CHAT, {**HI, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, IMAGE]}]}, "load; content"),
    "chat bad role": (CHAT, {"messages": [{"role": 1, "content": "x"}]}, "load; tokenize"),
    "chat no messages": (CHAT, {}, "load; tokenize"),
    "chat bad tools": (CHAT, {**HI, "tools": [{"type": "function"}]}, "load; tokenize"),
    "chat bad format": (CHAT, {**HI, "response_format": {"type": "json_schema"}}, PREFIX),
    "chat bad logprobs": (CHAT, {**HI, "top_logprobs": 2}, PREFIX),
    "embeddings": (EMBEDDINGS, {"input": "Hi"}, "load; api"),
    "response": (RESPONSES, {"input": "Hi", "max_output_tokens": 12, "store": False}, "load; api"),
    "response stream": (RESPONSES, {"input": "Hi", "max_output_tokens": 12, "store": False, **STREAM}, "load; api"),
    "response unknown": (RESPONSES, {"input": "Hi", "previous_response_id": "resp_none"}, "load; api"),
}
