"""The flags of `graphengine bench`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from graphengine.cli.option_flags import add_flags, kept_facts
from graphengine.cli.parser import CommandParser
from graphengine.options.option_syntax import GRAMMAR
from graphengine.profiles.flags import DTYPE_NAMES, SAMPLERS
from graphengine.profiles.shape_configs import NAMES, POLICIES

PEERS = ("transformers", "vllm")
COMMON = (
    *("--shape", "--checkpoint", "--batch", "--context", "--prompt-tokens", "--new-tokens"),
    *("--runs", "--ttft-tokens", "--device", "--dtype", "--quantize", "--tensor-parallel"),
    *("--speculative", "--kernels", "--record", "--out", "--json", "--verbose"),
)
"""Options that `--help` lists."""
ENGINE_FLAGS = (
    *("device", "row_family", "prefill_buckets"),
    *("max_prefill_tokens_per_step", "max_prefill_ms_per_step", "kv_dtype"),
    "state_dtype",
    *("quantize", "quantize_lm_head", "activations"),
)


def add_arguments(parser: CommandParser) -> None:
    """The options of `graphengine bench`."""
    parser.usage = "graphengine bench ... (see --help)"
    add = parser.add_argument
    add(
        "--shape",
        help=f"{', '.join([*POLICIES, *NAMES])} (default)",
    )
    add("--checkpoint", help="directory or hub id; shapes but demo have random weights")
    add(
        "--batch",
        help="live requests, a row each (default: 1,8,32; on a CPU or recorded 1; with drafts 1,8)",
    )
    _add_contexts(add)
    add(
        "--prompt-tokens", type=int, default=128, metavar="N", help="of each request (default: 128)"
    )
    add("--new-tokens", type=int, metavar="N", help="of each request (default: 256, on a CPU 32)")
    add("--runs", type=int, help="after a warm-up run (default: 5, on a CPU 2)")
    add("--sampler", choices=SAMPLERS, default="fast", help="greedy, or top-k 50")
    add("--max-batch", type=int, help="slots of every engine (default: the row's batch)")
    add(
        "--max-seq-len",
        type=int,
        help="longest request of every engine (default: what the row needs)",
    )
    add(
        "--ttft-tokens",
        help="prompt lengths that the model holds (default: 128,1024, on a CPU 128)",
    )
    add_flags(parser, kept_facts("EngineConfig"), only=ENGINE_FLAGS)
    add("--dtype", choices=DTYPE_NAMES, help="default: bfloat16 on a GPU, float32 on a CPU")
    add("--no-pdl", action="store_true", help="do not use programmatic dependent launch")
    add(
        "--tensor-parallel",
        metavar="N,N,..",
        help="ranks that split the model, with rows for each number (default: 1)",
    )
    add(
        "--lone-rank",
        action="store_true",
        help="with --shape, measure one of these ranks by itself, on one device: it pushes to "
        "itself what others would push to it; its tokens mean nothing, and its times lack the "
        "others",
    )
    add(
        "--long",
        type=int,
        default=0,
        metavar="N",
        help="measure N token gaps at batch 1, and again with more work for Python's collector",
    )
    add(
        "--record",
        type=Path,
        metavar="FILE",
        help="record every replay of N tokens (of the runs without --long) at one batch, as JSON "
        "lines; also measures what recording costs",
    )
    add(
        "--admission",
        type=int,
        nargs="?",
        const=1024,
        default=0,
        metavar="N",
        help="measure the token gaps of 7 requests while a prompt of N tokens (1024) is admitted",
    )
    _add_sweep(add)
    add("--kernels", action="store_true", help="time each kernel, without PDL (GPU only)")
    add("--peer", action="append", default=[], help=f"compare with: {', '.join(PEERS)}")
    add("--out", type=Path, help="JSON file to write")
    add("--json", action="store_true", help="print the JSON instead of tables")
    add("--verbose", action="store_true", help="log the memory budget and captures")
    parser.show_first(COMMON)


def _add_contexts(add: Callable[..., object]) -> None:
    """Add the options of contexts."""
    add(
        "--context",
        metavar="N,N,..",
        help="instead of rows, measure decode steps of each batch after N tokens of random KV each",
    )
    add("--prefill-context", action="store_true", help="prefill this KV from random prompts")


def _add_sweep(add: Callable[..., object]) -> None:
    """Add the options of a sweep over draft lengths."""
    add("--speculative", metavar="MODE", help=f"measure cost and gain of drafts: {GRAMMAR}")
    add("--drafts", metavar="K,K,..", help="draft lengths, 0 is plain decoding (default: MODE's)")
    add("--force-accepted", metavar="N,N,..", help="drafts to accept by force (default: 0 to K)")
    add(
        "--draft-vocab",
        metavar="N",
        help="size of the vocabulary that a shape's random module drafts from; with a checkpoint, "
        "TEXT:SIZE",
    )
