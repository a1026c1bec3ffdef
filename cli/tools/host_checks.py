"""Checks of `kvstore doctor` on this host: NUMA, RDMA addresses, NVMe disk, ports, certificates.

Each check has a verdict and advice; `root` is the root of the files it reads. Daemons' settings are read as plain texts, because a client
does not import the daemons' packages.
"""

import contextlib
import datetime
import os
import pwd
import shutil
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from kvstore.cli.tools.transport_checks import Check, CheckVerdict
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.ports import PORTS, Port
from kvstore.protocol.settings import format_size, parse_size
from kvstore.protocol.variables import CONFIG, SHARED_SECTION, shared_variable_name, variable_name
from kvstore.security.tls.pem_files import validities

REMOTE_FILE_SYSTEMS: Final = ("nfs", "nfs4", "cifs", "smb3", "ceph", "fuse.sshfs", "9p", "overlay", "tmpfs")
"""Unsuitable for an NVMe tier: slow, shared, or deleted with the container."""
EXPIRY_WARNING_DAYS: Final = 14.0
LISTENING: Final = "0A"
"""The state in /proc/net/tcp."""

DAEMONS: Final = ("master", "node", "router", "sidecar", "publisher")
CERTIFICATES: Final = ("tls_cert", "http_tls_cert")


def numa(root: Path = Path("/")) -> Check:
    """Return whether the kernel migrates pages of slabs between NUMA nodes, which unmaps them repeatedly."""
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    found = f"{nodes} NUMA node{'s' * (nodes != 1)}"
    if nodes > 1 and _text(root / "proc/sys/kernel/numa_balancing") not in ("", "0"):
        return Check("NUMA", CheckVerdict.WARNING, f"{found}; the kernel migrates pages between them", "sysctl -w kernel.numa_balancing=0")
    return Check("NUMA", CheckVerdict.OK, found)


def gids(root: Path = Path("/")) -> Check:
    """Return whether RDMA ports on Ethernet have a RoCE v2 address; without one they cannot reach other networks."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    ethernet = [port for port in ports if _text(port / "link_layer") == "Ethernet"]
    if not ethernet:
        return Check("GIDs", CheckVerdict.OK, "no RDMA port on Ethernet, none needed")
    routable = {port: [kind.name for kind in sorted(port.glob("gid_attrs/types/*")) if _text(kind) == "RoCE v2"] for port in ethernet}
    found = "; ".join(f"{port.parent.parent.name}:{port.name}: RoCE v2 at index {', '.join(of) or 'none'}" for port, of in routable.items())
    if all(routable.values()):
        return Check("GIDs", CheckVerdict.OK, found)
    return Check("GIDs", CheckVerdict.WARNING, found, "give the port's interface an IP address (ip addr add), then set UCX_IB_GID_INDEX=N")


def nvme(tier: str, root: Path = Path("/")) -> Check:
    """The disk under the folder of an NVMe tier, given as DIR or DIR:SIZE."""
    name = "NVMe folder"
    if not tier:
        return Check(name, CheckVerdict.OK, "not set: no --nvme DIR:SIZE, KVSTORE_NODE_NVME or [node] nvme of the settings file (--config)")
    text, _, size = tier.rpartition(":")
    folder, size_bytes = (Path(text), int(parse_size(size))) if text else (Path(tier), 0)
    try:
        there = next((path for path in (folder, folder.parent) if path.is_dir()), None)
    except PermissionError:
        return _for_owner(name, f"not checked: this user may not enter {folder.parent}", folder)
    if there is None:
        return Check(
            name, CheckVerdict.WRONG, f"neither {folder} nor {folder.parent} exists", f"mount its disk, or mkdir -p {folder.parent}"
        )
    kind, mounted_at = _mount(there.resolve(), root)
    free_bytes, own_bytes = shutil.disk_usage(there).free, _allocated_bytes(folder)
    found = f"{folder} on {kind} mounted at {mounted_at}, {format_size(free_bytes)} free"
    found += f", {format_size(own_bytes)} taken by the tier" if own_bytes else ""
    if not os.access(there, os.W_OK | os.X_OK):
        if there.stat().st_uid not in (0, os.geteuid()):
            return _for_owner(name, f"{found}; only its owner may write there", there)
        return Check(name, CheckVerdict.WRONG, f"{found}; this user has no write permission", f"chown $(id -u) {there}")
    if kind in REMOTE_FILE_SYSTEMS:
        return Check(name, CheckVerdict.WARNING, f"{found}; not a local disk", "mount a local disk (ext4, xfs) there")
    if size_bytes > free_bytes + own_bytes:
        return Check(name, CheckVerdict.WARNING, f"{found}; SIZE is {format_size(size_bytes)}", f"df -h {there}; give it a smaller SIZE")
    if mounted_at == "/":
        return Check(name, CheckVerdict.WARNING, f"{found}; this is the root disk", f"mount a separate disk at {there}")
    if _rotates(there, root):
        return Check(
            name, CheckVerdict.WARNING, f"{found}; a rotating disk", "use an SSD: recomputing a block is faster than a seek of this disk"
        )
    return Check(name, CheckVerdict.OK, found)


def ports(root: Path = Path("/")) -> Check:
    """Return whether the ports of a cluster (protocol/ports.py) are free or used by kvstore's own daemons."""
    taken = _listening(root)
    ours = {port: taken[port.number] for port in PORTS if port.number in taken}
    foreign = {port: holder for port, holder in ours.items() if "kvstore" not in holder}
    if foreign:
        users = ", ".join(f"{port.number} of {port.daemon} by {holder}" for port, holder in foreign.items())
        first = next(iter(foreign)).number
        return Check(
            "ports", CheckVerdict.WARNING, f"in use: {users}", f"ss -ltnp sport = :{first} shows the process; stop it, or change the port"
        )
    return Check("ports", CheckVerdict.OK, _listening_text(ours))


def _listening_text(ours: Iterable[Port]) -> str:
    numbers = ", ".join(str(port.number) for port in ours)
    return f"kvstore listens on {numbers}; the others are free" if numbers else "all free"


def certificate(file: str, now: datetime.datetime, whose: str = "") -> Check:
    """Validity of the certificate of the client's `tls_cert`, or of the setting `whose`."""
    name = f"TLS certificate{', ' * bool(whose)}{whose}"
    if not file:
        return Check(name, CheckVerdict.OK, "not set: TCP connections are not encrypted")
    try:
        first = validities(file)[0]
    except ConfigError as error:
        if whose and isinstance(error.__cause__, PermissionError):
            return _for_owner(name, f"not checked: {error}", Path(file))
        return Check(name, CheckVerdict.WRONG, str(error), f"ls -l {file}; kvstore certs creates one")
    left_days = (first.end - now).total_seconds() / 86_400
    found = f"{file} expires on {first.end:%Y-%m-%d}, in {left_days:.0f} days"
    if now < first.begin:
        return Check(name, CheckVerdict.WRONG, f"{file} is valid from {first.begin:%Y-%m-%d}", "set this machine's clock: timedatectl")
    if left_days < 0:
        return Check(
            name,
            CheckVerdict.WRONG,
            f"{file} expired on {first.end:%Y-%m-%d %H:%M} (UTC)",
            "replace the file: it is reloaded without a restart",
        )
    if left_days < EXPIRY_WARNING_DAYS:
        return Check(name, CheckVerdict.WARNING, found, "replace the file: it is reloaded without a restart")
    return Check(name, CheckVerdict.OK, found)


def _for_owner(name: str, found: str, path: Path) -> Check:
    """Return a check that this user cannot make, with the owner of the path as the user who can."""
    return Check(name, CheckVerdict.WARNING, found, f"run it as the user of the daemon: sudo -u {_owner(path)} kvstore doctor")


def _owner(path: Path) -> str:
    """Owner of the path, or of the nearest folder above it that is visible to this user."""
    for one in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            return _user(one.stat().st_uid)
    return "root"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _allocated_bytes(folder: Path) -> int:
    """Bytes that the files of an NVMe tier take on the disk; the files are sparse."""
    try:
        return sum(file.stat().st_blocks * 512 for file in folder.iterdir() if file.is_file())
    except OSError:  # there is none yet, or it is another user's
        return 0


def _mount(path: Path, root: Path) -> tuple[str, str]:
    """File system and mount point of a path."""
    mounts = [line.split()[1:3] for line in _text(root / "proc/mounts").splitlines()]
    under = [(Path(at), kind) for at, kind in mounts if path.is_relative_to(at)]
    if not under:
        return "an unknown file system", "/"
    at, kind = max(reversed(under), key=lambda found: len(found[0].parts))
    return kind, str(at)


def _rotates(path: Path, root: Path) -> bool:
    device = path.stat().st_dev
    block = root / "sys/dev/block" / f"{os.major(device)}:{os.minor(device)}"
    # A partition's queue directory is that of its disk.
    return "1" in (_text(block / "queue/rotational"), _text(block.resolve().parent / "queue/rotational"))


def _listening(root: Path) -> dict[int, str]:
    """Return listening TCP ports of PORTS -> command line of the process; that of another user's is hidden: "a process of USER"."""
    inodes: dict[str, int] = {}
    users: dict[int, int] = {}
    for table in ("tcp", "tcp6"):
        for line in _text(root / "proc/net" / table).splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING:
                number = int(fields[1].rpartition(":")[2], 16)
                inodes[fields[9]], users[number] = number, int(fields[7])
    sockets = {f"socket:[{inode}]": port for inode, port in inodes.items() if port in {port.number for port in PORTS}}
    found = {port: f"a process of {_user(users[port])}" for port in sockets.values()}
    for link in (root / "proc").glob("[0-9]*/fd/*") if sockets else ():
        try:
            port = sockets.get(os.readlink(link))
        except OSError:  # another user's process, or closed meanwhile
            continue
        if port is not None:
            found[port] = _text(link.parent.parent / "cmdline").replace("\0", " ")
    return found


def _text(path: Path) -> str:
    """Stripped text of a file; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def setting_of(section: str, name: str, config: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """Return a daemon's setting from its variables, else from `config` or the file of KVSTORE_CONFIG; "" if not set.

    The file must be valid TOML: the client's settings have been loaded from it before.
    """
    for variable in (variable_name(section, name), shared_variable_name(name)):
        if variable in environ:
            return environ[variable]
    file = config or environ.get(CONFIG, "")
    document = tomllib.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    tables = [table for table in (document.get(section), document.get(SHARED_SECTION)) if isinstance(table, dict)]
    return str(next((table[name] for table in tables if name in table), ""))


def certificate_files(config: str | None = None, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the daemons' certificate files by the first setting that names each, such as "[node] http_tls_cert"."""
    found: dict[str, str] = {}
    for section in DAEMONS:
        for name in CERTIFICATES:
            file = setting_of(section, name, config, environ)
            if file and file not in found.values():
                found[f"[{section}] {name}"] = file
    return found
