"""Run in an engine's environment: `parsing_child.py ENGINE`, with command lines as a JSON list of lists on standard input.

Prints one JSON list: for each command line the engine's complaint, "" if its own parser and configuration take it. No engine is started.
"""

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any


def parse_vllm(words: Sequence[str]) -> None:
    """`python -m MODULE ...`: arguments, then the engine's whole configuration, as the server makes it."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(list(words[3:]))
    validate_parsed_serve_args(arguments)
    config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    if config.kv_transfer_config.kv_connector_module_path:
        KVConnectorFactory.get_connector_class(config.kv_transfer_config)


def parse_sglang(words: Sequence[str]) -> None:
    """`python -m sglang.launch_server ...`."""
    from sglang.srt.server_args import prepare_server_args

    prepare_server_args([*words[3:], "--device", "cpu"])


def parse_lmcache(words: Sequence[str]) -> None:
    """`lmcache COMMAND ...`."""
    from lmcache.cli.main import register_commands

    parser = argparse.ArgumentParser(prog="lmcache")
    register_commands(parser.add_subparsers(dest="command", required=True), list(words[1:]))
    parser.parse_args(list(words[1:]))


PARSERS: dict[str, Callable[[Sequence[str]], None]] = {"vllm": parse_vllm, "sglang": parse_sglang, "lmcache": parse_lmcache}


def complaint(parse: Callable[[Sequence[str]], Any], words: Sequence[str]) -> str:
    """Return the parser's error message, or "" if it accepts `words`. The parser exits on an error."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parse(words)
    except SystemExit:
        return said.getvalue() or "it ends"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    complaints = [complaint(PARSERS[sys.argv[1]], words) for words in json.load(sys.stdin)]
    sys.__stdout__.write("\n" + json.dumps(complaints) + "\n")  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
