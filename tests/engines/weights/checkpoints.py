"""Small checkpoints on the disk, written as their formats say."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def safetensors(tensors: Mapping[str, bytes], *, offset: int = 0, metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a file with these tensors, of u8; `offset` moves what the header says of them."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = offset
    for name, value in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(value)], "data_offsets": [start, start + len(value)]}
        start += len(value)
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + b"".join(tensors.values())


def write_checkpoint(folder: Path, *, tensors: int = 6, size_bytes: int = 20_000) -> Path:
    """Two safetensors files and a configuration, in a folder that is made."""
    folder.mkdir(parents=True)
    for part in range(2):
        values = {f"model.layers.{index}.weight": bytes([index]) * size_bytes for index in range(part, tensors, 2)}
        (folder / f"model-{part}.safetensors").write_bytes(safetensors(values))
    (folder / "config.json").write_text("{}")
    return folder


def write_snapshot(hub: Path, name: str, commit: str, files: Mapping[str, bytes], *, reference: str = "main") -> Path:
    """A model in a Hugging Face cache: blobs, links to them in a snapshot, and a reference."""
    root = hub / f"models--{name.replace('/', '--')}"
    for folder in ("blobs", "refs", f"snapshots/{commit}"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for index, (file, value) in enumerate(files.items()):
        (root / "blobs" / f"{commit}{index}").write_bytes(value)
        (root / "snapshots" / commit / file).symlink_to(Path("../../blobs") / f"{commit}{index}")
    (root / "refs" / reference).write_text(commit + "\n")
    return root / "snapshots" / commit
