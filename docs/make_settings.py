"""Prints docs/settings.md, from the code: `python docs/make_settings.py > docs/settings.md`."""

import sys
from collections.abc import Sequence
from typing import Any, Final

from kvstore.cli.check import settings_kind
from kvstore.protocol.settings import flag_name, settings_of, show_default
from kvstore.protocol.variables import SECTIONS, shared_variable_name, variable_name

HEAD: Final = """# Settings

Made by `python docs/make_settings.py > docs/settings.md`; a test holds it to the code.

    KVSTORE_TLS_CA=/etc/kvstore/ca.pem        # every program of this host
    KVSTORE_NODE_TLS_CA=/etc/kvstore/node.pem # but kvstore-node

A *shared setting* belongs to several programs; the table below names them. All other settings belong to one program.

Every program takes each of its settings from the first of these that has it:

1. the flag,
2. the program's own environment variable, `KVSTORE_NODE_TLS_CA`,
3. for a shared setting, the variable of all programs, `KVSTORE_TLS_CA`,
4. the program's own section of one TOML file, `[node]`, which `--config FILE` or `KVSTORE_CONFIG` names,
5. for a shared setting, the section `[shared]` of that file,
6. the default.

A program refuses, by name:

- variables that are nearly one of its own or nearly a shared one,
- sections of the file that no program has,
- settings in its own section that it does not have,
- settings in `[shared]` that no program shares.

Sizes are numbers of bytes with an optional unit: `4KiB`, `64MiB`, `1.5GiB` (1024), `10GB` (1000). Times are in seconds.
"""

SHARED_HEAD: Final = """
## Shared settings

The own variable of a program is `KVSTORE_`, the program and the name: `KVSTORE_NODE_HTTP`. Its own key has the same name as the one
in `[shared]`. The flags are those of programs that have flags. Where defaults differ, the table gives each.

"""

PROGRAMS: Final[tuple[tuple[str, str, str], ...]] = (
    ("kvstore-master", "", "master"),
    ("kvstore-node", "", "node"),
    ("kvstore-router", "", "router"),
    ("kvstore-sidecar", "", "sidecar"),
    ("kvstore-publisher", "", "publisher"),
    (
        "kvstore, Client and AsyncClient",
        "The commands of `kvstore` have the flags `--master`, `--tenant`, `--token` and `--deadline-s`; the other settings come from the\n"
        "environment or the file. `Client` and `AsyncClient` take each value from the first of these sources that gives it:\n\n"
        "1. the arguments `master`, `tenant`, `token` and `deadline_s`,\n"
        "2. `settings=ClientSettings(...)`; a field with its default counts as not given,\n"
        "3. the environment, 4. the file that `KVSTORE_CONFIG` names, 5. the default.\n\n"
        "An argument that differs from `settings` is refused (`InvalidArgument`). With `ClientSettings(..., is_loaded=True)` the client\n"
        "reads neither environment nor file.\n\n",
        "client",
    ),
    (
        "Transfer engine",
        "Of every program that has one; [transfer.md](transfer.md) says what they do. They have no flags. In Python pass\n"
        "`TransferSettings(...)` to `TransferEngine`, or as `transfer=` to `Client` and `AsyncClient`.\n\n",
        "transfer",
    ),
    (
        "Traces",
        "Of masters, nodes, clients, routers and sidecars; [tracing.md](tracing.md) says what they do. They have no flags. In Python pass\n"
        "`tracing=TracingSettings(...)` to `Client` and `AsyncClient`, which else take them from environment and file.\n\n",
        "tracing",
    ),
    (
        "Hand-over",
        "Of `CacheTransceiver`; [kvcache.md](kvcache.md#hand-over-between-engines) says what they do. They have no flags. In Python pass\n"
        "`HandoverSettings(...)`; an engine that reads environment and file calls `load_settings`.\n\n",
        "handover",
    ),
    (
        "SGLang's plug-in",
        "Of `kvstore.engines.sglang`; [engines.md](engines.md#sglang) says what they do. They have no flags: SGLang hands over what its\n"
        "`--hicache-storage-backend-extra-config` names.\n\n",
        "sglang",
    ),
    (
        "LMCache's plug-ins",
        "Of `kvstore.engines.lmcache`; [engines.md](engines.md#lmcache) says what they do. They have no flags: LMCache hands over what\n"
        "its `adapter_params`, or the entries of a remote connector, name.\n\n",
        "lmcache",
    ),
    (
        "Mooncake's API",
        "Of `kvstore.engines.mooncake`; [engines.md](engines.md#mooncake) says what they do. They have no flags, and Mooncake's\n"
        "`setup` has no argument for them.\n\n",
        "mooncake",
    ),
    (
        "vLLM's connector",
        "Of `kvstore.engines.vllm`; [engines.md](engines.md#vllm) says what they do. They have no flags: vLLM hands over what its\n"
        "`kv_connector_extra_config` names.\n\n",
        "vllm",
    ),
    (
        "Stand-in engines",
        "Of `python -m kvstore.router.fake_engine.engine`; [router.md](router.md) says what they are for.\n\n",
        "fake_engine",
    ),
)
"""Title, remark and section of each."""
WITHOUT_FLAGS: Final = ("transfer", "handover", "lmcache", "mooncake", "sglang", "tracing", "vllm")


def text() -> str:
    """The whole file."""
    assert {section for _, _, section in PROGRAMS} == SECTIONS
    return HEAD + SHARED_HEAD + shared_table() + "".join(map(program, PROGRAMS))


def shared_table() -> str:
    """One row a shared setting, with the programs that have it."""
    having: dict[str, list[tuple[str, Any]]] = {}
    for _, _, section in PROGRAMS:
        for field in settings_of(settings_kind(section)):
            if field.metadata["shared"]:
                having.setdefault(field.name, []).append((section, field))
    rows = [
        (
            f"`{flag_name(name)}`",
            f"`{shared_variable_name(name)}`",
            f"`{name}`",
            _defaults(fields),
            ", ".join(section for section, _ in fields),
            one_help(fields),
        )
        for name, fields in having.items()
    ]
    return table(("flag", "environment", "`[shared]` in TOML", "default", "programs", "meaning"), rows)


def one_help(fields: list[tuple[str, Any]]) -> str:
    """The meaning of a shared setting, which is the same in all programs."""
    (meaning,) = {field.metadata["help"] for _, field in fields}
    return str(meaning)


def _defaults(fields: list[tuple[str, Any]]) -> str:
    """The default of a shared setting, and those of the programs that have another one."""
    by_default: dict[str, list[str]] = {}
    for section, field in fields:
        by_default.setdefault(show_default(field.default), []).append(section)
    (usual, _), *others = sorted(by_default.items(), key=lambda item: -len(item[1]))
    return "; ".join([f"`{usual}`" if usual else ""] + [f"{', '.join(sections)}: `{default}`" for default, sections in others])


def program(entry: tuple[str, str, str]) -> str:
    """The chapter of one program: the settings of its own, and the names of the shared ones."""
    title, remark, section = entry
    fields = settings_of(settings_kind(section))
    rows = [
        (
            f"`{flag_name(field.name)}`",
            f"`{variable_name(section, field.name)}`",
            f"`{field.name}`",
            f"`{show_default(field.default)}`" if show_default(field.default) else "",
            field.metadata["help"],
        )
        for field in fields
        if not field.metadata["shared"]
    ]
    first = 1 if section in WITHOUT_FLAGS else 0
    heads = ("flag", "environment", f"`[{section}]` in TOML", "default", "meaning")
    own = table(heads[first:], [row[first:] for row in rows]) if rows else ""
    names = ", ".join(f"`{field.name}`" for field in fields if field.metadata["shared"])
    shared = f"Of the [shared settings](#shared-settings) it has {names}.\n" if names else ""
    return f"\n## {title}\n\n{remark}{own}" + ("\n" if own and shared else "") + shared


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "".join("| " + " | ".join(row) + " |\n" if row else "|---" * len(heads) + "|\n" for row in (heads, (), *rows))


if __name__ == "__main__":
    sys.stdout.write(text())
