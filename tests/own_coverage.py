"""Fails unless each module of the packages and lists below is fully branch-covered by its own test file.

Reads what own_tracer.py wrote, with a context a file of tests. What runs at import has none and counts for every file.
Tracing more than doubles what a test takes: the heaviest, without which their module is still covered, are marked `no_cover`.
"""

import io
import re
import sys
from pathlib import Path

from coverage import Coverage
from coverage.exceptions import NoDataError

ROOT = Path(__file__).resolve().parent.parent
WRITTEN = "build/own_coverage"
"""Where processes of tests leave what they ran; each adds a suffix of its own."""
WHOLE_PACKAGES = ("protocol", "kvcache", "tiers", "scheduler", "lab", "telemetry")
PARTS = {
    "rpc": (
        "arriving busy_poll deadline exchange gil_contention incoming observing owners questions refusal_log shelf speaking tenant_loads "
        "tracing"
    ),
    "security": "actor binding credentials file_signature grpc_metadata guard identity rules toml_file",
    "security/quotas": "in_force quota reading tables telling",
    "security/tickets": "form issuing keyring",
    "security/tls": "authority certificates https identities own pair refusals revoked subjects validity",
    "transfer": "description notices",
    "transfer/topology": "model json_form netlink routing",
    "transfer/paths": "choice bandwidth rails rail_counts slices transports peer transfers carrier spans batches",
    "transfer/memory": "region exports mapping liveness shield pieces location",
    "transfer/streams": "endpoints sieve strangers",
    "store": "admission comparison memory_plan spilling",
    "store/blocks": "crowding holds limits quotas slab_limits slots_ahead",
    "master/directory": (
        "audit_log directory comparison draining targets following operator_quotas queries pins removing rows lineage keys key_index "
        "membership placement records publishing pending removals reservations tenants holders rates heat hot_copies contents "
        "usage segments spilled_rows recording last_copies lending load shares spilling"
    ),
    "master/audit": "change repeats trail",
    "master/roles": "relay standing",
    "console": "banners cached documents events flows history model rates tenants watch",
    "client": "holds put_targets",
    "client/jobs": "board breaker lane stats",
    "client/tensors": "arrays groups parts pools prompts staging steps streams",
    "engines/lmcache": "locks",
    "engines/mooncake": "arguments leases patterns",
    "engines/vllm": "adapters checkpoint checks counters disaggregation fields groups hits holds identity plan settings staging trouble "
    "variants waiting_requests",
    "engines": "head_split",
    "engines/publisher": "conductor form prefix_table sockets",
    "engines/sglang": "arguments head_pages host_heads pages weights",
    "engines/kv_events": "block_keys events subscriber",
    "engines/sidecar": "blocks load",
    "engines/weights": "files fingerprint identity remembered samples state tensors",
    "handover": "arguments description handles latch",
    "handover/sending": "request",
    "handover/receiving": "request ways",
    "handover/ranks": "roll_call",
    "handover/movements": "ending parts staging windows",
}
"""What needs neither network nor sockets: the rest is held to the conformance suites, or tested with real processes."""
EXCEPT = re.compile(r"_pb2(_grpc)?\.py$|__init__\.py$|conformance\.py$")


def modules() -> list[Path]:
    found = [path for package in WHOLE_PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found += [ROOT / folder / f"{name}.py" for folder, names in PARTS.items() for name in names.split()]
    return [path for path in found if not EXCEPT.search(path.name) and "def " in path.read_text()]  # constants alone have no branch


def own_test(module: Path) -> str:
    folder = module.relative_to(ROOT).parent
    return f"tests/{folder}/test_{module.name}"


def covered_percent(coverage: Coverage, module: Path) -> tuple[float, str]:
    own = own_test(module)
    text = io.StringIO()
    try:
        percent = coverage.report(
            include=[str(module.relative_to(ROOT))],
            contexts=[rf"^{re.escape(own)}$", "^$"],
            show_missing=True,
            file=text,
            skip_empty=False,
        )
    except NoDataError:
        return 0.0, f"{own} runs none of it"
    return percent, text.getvalue().splitlines()[-3]


def main() -> int:
    if sys.argv[1:] == ["--tests"]:
        print(*(own_test(module) for module in modules()))
        return 0
    written = ROOT / WRITTEN
    coverage = Coverage(data_file=str(written), config_file=str(ROOT / "pyproject.toml"))
    coverage.combine(list(map(str, written.parent.glob(f"{written.name}.*"))), keep=True)
    lacking = []
    for module in modules():
        percent, detail = covered_percent(coverage, module)
        if percent < 100:
            lacking.append(detail)
    for line in lacking:
        print(f"not covered by its own tests: {line}")
    print(f"{len(modules()) - len(lacking)} of {len(modules())} modules are fully covered by their own test files")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
