"""A benchmark document of a policy as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def describe_policy(document: Mapping[str, Any]) -> str:
    """The figures of a policy's chunks."""
    found, ceiling = document["policy"], document["ceiling"]
    floor, chunk = found["floor"], found["chunk_ms"]
    limit = "no read ceiling" if ceiling is None else f"read ceiling {ceiling['tb_s']:.2f} TB/s"
    star = "*" if "p99" in chunk["unsupported"] else ""
    lines = [
        f"{document['shape']}, {found['dtype']}, on {document['environment']['device']}: {limit}",
        f"a prefix of {found['prefix_tokens']} positions, {found['horizon']} actions, "
        f"{found['steps']} denoising steps; {chunk['n']} chunks, all equal; milliseconds",
        f"chunk      p50 {chunk['p50']:.3f}, p99 {chunk['p99']:.3f}{star}, max {chunk['max']:.3f}"
        f"{_limit(floor, 'chunk')}",
    ]
    if found["denoiser_ms"] is not None:
        lines += [
            f"denoiser   {found['denoiser_ms']:.3f}, {found['ms_per_step']:.3f} a step"
            f"{_limit(floor, 'denoiser')}",
            f"prefix     {found['prefix_ms']:.3f}, with the state and the way to the device and "
            f"back",
        ]
    often = "once, from L2 after that" if floor["expert_reads"] == 1 else "each step"
    lines.append(
        f"read: prefix {_gb(floor['prefix_bytes'])} once ({floor['prefix_tflop']:.2g} TFLOP), "
        f"state {_gb(floor['state_bytes'])}, expert {_gb(floor['expert_bytes'])} and KV "
        f"{_gb(floor['kv_bytes'])} {often}; a chunk {_gb(floor['chunk_bytes'])}"
    )
    if star:
        lines.append("* too few values for this percentile, which is then the maximum")
    return "\n".join(lines)


def _limit(floor: Mapping[str, Any], what: str) -> str:
    took, share = floor[f"{what}_ms"], floor[f"{what}_share"]
    if took is None or share is None:
        return ""
    return f"; floor {took:.3f}, a share of {100 * share:.0f}%"


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
