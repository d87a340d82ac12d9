"""Reads W&B's offline run file: 32 KiB blocks of framed protobuf records, after a 7-byte file header.

The framing is LevelDB's log format: per fragment a checksum (4 bytes), a length (2, little endian) and a kind
(1 whole, 2 first, 3 middle, 4 last); a block's last bytes are zero where no fragment header fits.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

BLOCK = 32 * 1024


def records(path: Path) -> list[Any]:
    """All protobuf records of a run file."""
    from wandb.proto import wandb_internal_pb2

    raw = path.read_bytes()
    assert raw[:4] == b":W&B"
    found, parts, at = [], [], 7
    while at + 7 <= len(raw):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", raw, at + 4)
        parts.append(raw[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            found.append(record)
            parts = []
    return found


def history(path: Path) -> list[dict[str, Any]]:
    """Rows that were logged."""
    rows = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    return rows
