"""What `knot inspect` prints."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from knot.header import PHASES, KnotHeader


def as_json(header: KnotHeader) -> str:
    """The header as one JSON object: what the file states, and what follows from it."""
    return json.dumps(_facts(header))


def as_text(header: KnotHeader) -> str:
    """The header as a table for people."""
    facts = _facts(header)
    config = facts["config"]
    lines = [
        f"{header.name}",
        f"  fingerprint  {header.fingerprint}",
        f"  payload      {header.sha256} (SHA-256)",
    ]
    lines.append(f"  file         {header.file_size:,} bytes, payload from {header.payload_offset:,}")
    lines += ["", "config"]
    width = max(map(len, config))
    lines += [f"  {key:{width}}  {_shown(value)}" for key, value in config.items()]
    lines += ["", "type    tensors           bytes"]
    lines += [f"{kind:7} {entry['tensors']:7} {entry['bytes']:15,}" for kind, entry in facts["types"].items()]
    lines += ["", "phase      smallest (layer)      largest (layer)"]
    for phase, entry in facts["phases"].items():
        small, large = entry["smallest"], entry["largest"]
        lines.append(
            f"{phase:9} {small['bytes']:10,} ({small['layer']:3}) {large['bytes']:14,} ({large['layer']:3})"
        )
    lines += ["", "section       offset         bytes"]
    lines += [
        f"{name:9} {entry['offset']:10,} {entry['bytes']:13,}" for name, entry in facts["sections"].items()
    ]
    return "\n".join(lines)


def _facts(header: KnotHeader) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for info in header.tensors.values():
        counts[info.type] += 1
        sizes[info.type] += info.length
    vectors = header.vector_range(0, header.config.num_layers)
    head, table = header.head_tensor(), header.embedding_tensor()
    return {
        "name": header.name,
        "fingerprint": header.fingerprint,
        "sha256": header.sha256,
        "file_bytes": header.file_size,
        "payload_offset": header.payload_offset,
        "config": header.config.to_json(),
        "tensors": len(header.tensors),
        "row_groups": sum(info.group_count for info in header.tensors.values()),
        "types": {kind: {"tensors": counts[kind], "bytes": sizes[kind]} for kind in sorted(counts)},
        "phases": {phase: _extremes(header, phase) for phase in PHASES},
        "vectors": {"offset": vectors.offset, "bytes": vectors.length},
        "embedding": {"tensor": table.name, "type": table.type, "row_bytes": table.row_bytes},
        "head": {"tensor": head.name, "type": head.type, "row_bytes": head.row_bytes},
        "sections": {
            name: {"offset": section.offset, "bytes": section.length}
            for name, section in header.sections.items()
        },
    }


def _extremes(header: KnotHeader, phase: str) -> dict[str, dict[str, int]]:
    lengths = [header.phase_range(layer, phase).length for layer in range(header.config.num_layers)]
    small, large = min(lengths), max(lengths)
    return {
        "smallest": {"bytes": small, "layer": lengths.index(small)},
        "largest": {"bytes": large, "layer": lengths.index(large)},
    }


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
