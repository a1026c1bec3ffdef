"""Top-level click group of `kvstore`: lazy loading, sections and examples in the help, suggestions, errors as one line."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import click

from kvstore.protocol.errors import Corrupt, KVStoreError

EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "status": ("kvstore status --master master-1:7440,master-2:7440",),
    "health": ("kvstore health || echo 'page the operator'",),
    "nodes": ("kvstore nodes --json",),
    "tiers": ("kvstore tiers",),
    "topology": ("kvstore topology --node n1", "kvstore topology --local --svg host.svg"),
    "top": ("kvstore top --interval-s 2",),
    "console": ("kvstore console --listen 127.0.0.1:8080 --master master-1:7440",),
    "instances": ("kvstore instances",),
    "namespaces": ("kvstore namespaces --json",),
    "namespaces show": ("kvstore namespaces show 3f2a",),
    "namespaces diff": ("kvstore namespaces diff 3f2a 91c0",),
    "weights": ("kvstore weights",),
    "weights retire": ("kvstore weights retire 5d41402a@step-1200",),
    "doctor": ("kvstore doctor --config /etc/kvstore/kvstore.toml",),
    "put": ("kvstore put greeting hello.txt --namespace docs", "kvstore put hex:00ff - < value"),
    "get": ("kvstore get greeting copy.txt",),
    "exists": ("kvstore exists greeting hex:00ff",),
    "locate": ("kvstore locate greeting",),
    "keys": ("kvstore keys --namespace docs --limit 10",),
    "prefetch": ("kvstore prefetch greeting hex:00ff",),
    "rm": ("kvstore rm greeting", "kvstore rm --namespace docs --pattern 'chat-*'"),
    "pin": ("kvstore pin greeting --ttl-s 3600",),
    "unpin": ("kvstore unpin greeting",),
    "retain": ("kvstore retain greeting --priority 90 --ttl-s 3600",),
    "end-session": ("kvstore end-session chat-17",),
    "drain": ("kvstore drain n1 --wait-s 600", "kvstore drain n1 --cancel"),
    "forget": ("kvstore forget n1",),
    "quota": ("kvstore quota show",),
    "quota show": ("kvstore quota show --json",),
    "quota set": ("kvstore quota set my-team --dram-bytes 96GiB --blocks none",),
    "quota clear": ("kvstore quota clear my-team dram_bytes",),
    "audit": ("kvstore audit --since 2h --by on-call", "kvstore audit --refused --json"),
    "sessions": ("kvstore sessions", "kvstore sessions --end 17"),
    "slow": ("kvstore slow --of-tenant my-team",),
    "plan": ("kvstore plan --model llama3-8b --gpu H100",),
    "simulate": ("kvstore simulate trace.jsonl --prefill 4 --decode 4",),
    "lab": ("kvstore lab events.jsonl --policies lru,prefix",),
    "record": ("kvstore record events.jsonl --duration 600",),
    "replay": ("kvstore replay trace.jsonl --limit 1000",),
    "bench": ("kvstore bench",),
    "up": ("kvstore up --nodes 2 --dram 4GiB",),
    "demo": ("kvstore demo",),
    "token": ("kvstore token new --tenant my-team",),
    "token ls": ("kvstore token ls",),
    "token new": ("kvstore token new --tenant my-team --out my-team.token",),
    "certs": ("kvstore certs init pki",),
    "certs init": ("kvstore certs init pki",),
    "certs master": ("kvstore certs master pki --host master-1",),
    "certs node": ("kvstore certs node pki n1 --host node-1",),
    "certs client": ("kvstore certs client pki my-team",),
    "check": ("kvstore check /etc/kvstore/tokens.toml /etc/kvstore/kvstore.toml",),
    "completion": (
        "source <(kvstore completion bash)",
        "kvstore completion fish > ~/.config/fish/completions/kvstore.fish",
    ),
}
"""Command, or command and subcommand -> example lines for a shell."""

PROGRAM: Final = "kvstore"
CORRUPT_STATUS: Final = 1
ERROR_STATUS: Final = 2
INTERRUPTED_STATUS: Final = 130


class CommandGroup(click.Group):
    """Click group that imports a command's module when the command is used: importing all takes three times as long as one."""

    def __init__(self, *arguments: Any, sections: Mapping[str, Mapping[str, str]] = {}, **settings: Any) -> None:
        """`sections`: title -> command -> its module in this folder. The help lists only these commands."""
        super().__init__(*arguments, **settings)
        self._sections = sections
        self.modules = {name: module for section in sections.values() for name, module in section.items()}

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. A KVStoreError becomes one line on standard error and an exit status."""
        try:
            return super().invoke(ctx)
        except KVStoreError as error:
            click.echo(f"kvstore: error: {error}", err=True)
            ctx.exit(CORRUPT_STATUS if isinstance(error, Corrupt) else ERROR_STATUS)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED_STATUS)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            message = f"{error.message} Options follow the command: kvstore COMMAND [OPTIONS]."
            raise click.NoSuchOption(error.option_name, message, error.possibilities, ctx) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.modules, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(import_module(f"{__package__}.{self.modules[cmd_name]}"), cmd_name.replace("-", "_"))
        _add_examples(command, cmd_name)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:  # click itself suggests only commands that are loaded
            raise click.NoSuchCommand(error.command_name, possibilities=self.list_commands(ctx), ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per title, all with the same width of the first column."""
        width = max(map(len, self.modules))
        for title, section in self._sections.items():
            commands = [(name, self.get_command(ctx, name)) for name in section]
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), command.get_short_help_str()) for name, command in commands if command is not None])


def _add_examples(command: click.Command, path: str) -> None:
    """Append the examples to the help of the command and of its subcommands."""
    if path in EXAMPLES:
        command.epilog = "\b\nExample:\n" + "\n".join(f"  {line}" for line in EXAMPLES[path])
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            _add_examples(below, f"{path} {name}")
