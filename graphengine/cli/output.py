"""Prints results for commands."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import repeat
from typing import Any

import numpy as np

from graphengine.cli.terminal import columns, fit
from graphengine.engine import Engine
from graphengine.requests.result import Result, TokenLogprobs


def summarise(engine: Engine, result: Result, counters: Counter[str]) -> dict[str, Any]:
    """Latencies in milliseconds, the request's buckets, and the results of its drafts.

    Gaps are between steps: the tokens of one step arrive together.
    """
    moments = list(dict.fromkeys(result.timings.tokens))
    first, gaps = result.timings.time_to_first_token, np.diff(moments).tolist()
    p50, p99 = np.percentile(gaps, [50, 99]).tolist() if gaps else (None, None)
    replays = {
        name.removeprefix("replays/"): count
        for name, count in counters.items()
        if name.startswith("replays/")
    }
    return {
        "prompt_tokens": len(result.prompt_token_ids),
        "cached_tokens": result.cached_tokens,
        "new_tokens": len(result.token_ids),
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "seed": result.seed,
        "ttft_ms": _milliseconds(first),
        "itl_p50_ms": _milliseconds(p50),
        "itl_p99_ms": _milliseconds(p99),
        "replays": replays,
        "acceptance": result.acceptance.as_dict() if engine.config.drafts else None,
        "device": str(engine.memory.device),
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def print_summary(summary: dict[str, Any], result: Result) -> None:
    """Print figures of a text to standard error: the text alone may go into a file."""
    buckets = ", ".join(f"{name} x{count}" for name, count in summary["replays"].items())
    stopped = "" if summary["stop_reason"] is None else f" ({summary['stop_reason']!r})"
    latencies = []
    if summary["ttft_ms"] is not None:
        latencies.append(f"time to first token {summary['ttft_ms']} ms")
    if summary["itl_p50_ms"] is not None:
        latencies.append(f"inter-token p50 {summary['itl_p50_ms']} ms")
        latencies.append(f"p99 {summary['itl_p99_ms']} ms")
    lines = [
        f"{summary['prompt_tokens']} prompt + {summary['new_tokens']} new tokens on "
        f"{summary['device']}, finished by {summary['finish_reason']}{stopped}, "
        f"seed {summary['seed']}",
        ", ".join(latencies),
        f"buckets: {buckets}",
    ]
    if summary["acceptance"] is not None:
        lines.append(f"speculation: {result.acceptance}")
    shown = "\n".join(line for line in lines if line)
    print(f"\n{fit(shown, columns(sys.stderr))}", file=sys.stderr)


def print_logprobs(result: Result) -> None:
    """Print a line for each prompt token and each new token whose logprobs were asked for.

    They go to standard error, as the other figures do.
    """
    width = columns(sys.stderr)
    for token, logprobs in zip(result.prompt_token_ids, result.prompt_logprobs or (), strict=False):
        # No token precedes the first one.
        line = f"{token:>7}" if logprobs is None else _logprobs_line(token, "", logprobs)
        print(fit(line, width), file=sys.stderr)
    texts = (repr(each.text) for each in result.segments) if result.segments else repeat("''")
    for token, text, logprobs in zip(result.token_ids, texts, result.logprobs or (), strict=False):
        print(fit(_logprobs_line(token, text, logprobs), width), file=sys.stderr)


def _logprobs_line(token: int, text: str, logprobs: TokenLogprobs) -> str:
    """The token, its text, log-probability and rank, then the most probable ids."""
    own, *others = logprobs.items()
    best = ", ".join(f"{other} {found.logprob:.3f}" for other, found in others)
    return f"{token:>7} {text:<16} {own[1].logprob:8.3f} rank {own[1].rank}  {best}".rstrip()
