"""Causes of late tokens: every cause that a report names, what took longer, and a remedy.

The report shows the remedy beside the cause; docs/profiling.md has the same table.
"""

from __future__ import annotations

from typing import NamedTuple


class Cause(NamedTuple):
    """A cause by the name it has in a report.

    grew    the work that took longer than usual
    remedy  advice, as an imperative; names of code are between backticks
    """

    name: str
    grew: str
    remedy: str


CAUSES = (
    Cause(
        "outside",
        "time between two calls of `step()`",
        "look at your own loop: logging, a lock, a sleep, another thread that holds the GIL",
    ),
    Cause(
        "sync",
        "the same, but it ended just as the device did",
        "take `torch.cuda.synchronize()`, `.item()`, `.cpu()` and prints of tensors out of your "
        "loop",
    ),
    Cause(
        "cpu",
        "time for which your thread was ready to run, but its core ran something else",
        "give the process cores of its own (`taskset`, `os.sched_setaffinity`) or a higher "
        "priority (`nice`, `chrt`), stop what runs beside it, or take fewer threads "
        "(`OMP_NUM_THREADS`, `torch.set_num_threads`)",
    ),
    Cause(
        "skew",
        "a rank launched its part later than your process did",
        "give that rank's process a core of its own, or look at the machine's load",
    ),
    Cause(
        "prefill",
        "a prompt was fed in between",
        "lower `max_prefill_ms_per_step` or `max_prefill_tokens_per_step`",
    ),
    Cause("bucket", "the step ran in more rows than most", "capture a bucket between: `buckets=`"),
    Cause(
        "pause",
        "steps went by without the request",
        "leave room for more KV blocks: raise `memory_fraction`, or lower `max_seq_len` or "
        "`max_batch`",
    ),
    Cause(
        "device",
        "the same graph took longer on the device",
        "look at the device's clocks (on a GPU `nvidia-smi -q -d CLOCK,PERFORMANCE`), at other "
        "processes on it, and at contexts that grew; then look for the kernel that grew",
    ),
    Cause(
        "plan",
        "planning the step on the host",
        "admit fewer requests in one step, and cancel those whose tokens nobody wants",
    ),
    Cause(
        "load",
        "copying what changed to the device",
        "admit fewer requests in one step; grammars bring a mask for every token",
    ),
    Cause(
        "launch",
        "launching the graph",
        "look for another thread that calls CUDA meanwhile, and for a profiler that is attached",
    ),
    Cause(
        "deliver",
        "handing out the tokens",
        "shorten `on_event` callbacks, and use fewer stop strings",
    ),
    Cause(
        "late",
        "the host waited longer than the device worked",
        "freeze Python's heap (`gc.freeze()`) or allocate less, so that its collector runs less; "
        "look for threads that hold the GIL",
    ),
    Cause(
        "unknown",
        "unknown, as the file does not tell what the host did",
        "record the run with `engine.recorder`, which keeps the host's stages",
    ),
    Cause(
        "idle",
        "nothing, but in *every* step the device has nothing to do for a while",
        "shorten the part of the host's work that the line names, or take `lookahead=1`",
    ),
    Cause(
        "padding",
        "nothing, but rows were computed that no request used",
        "capture the bucket that the line names: `buckets=`",
    ),
)
REMEDIES = {cause.name: cause.remedy for cause in CAUSES}
