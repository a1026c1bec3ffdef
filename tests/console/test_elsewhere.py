"""Promises of elsewhere.py: who looks for a console where there is none is told where it is."""

import shlex

from click.testing import CliRunner

from kvstore.client.cli.main import kvstore
from kvstore.console.elsewhere import TEXT, add_pointer
from kvstore.telemetry.http.server import HttpServer
from tests.telemetry.http.asking import ask


def test_the_command_that_serves_the_console_is_told_to_everybody() -> None:
    server = HttpServer("127.0.0.1:0")
    server.later(add_pointer)
    server.start()
    try:
        answer = ask(server.address, "/")
    finally:
        server.close()
    assert (answer.status, answer.text) == (404, TEXT)
    [line] = [line for line in TEXT.splitlines() if line.startswith("    ")]
    program, command, flag, _ = shlex.split(line)
    assert (program, command) == ("kvstore", "console")
    assert f"{flag} " in CliRunner().invoke(kvstore, [command, "--help"], catch_exceptions=False).output
