"""The memory of rings: which layers have them, what the budget says, and what is allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpoints.small_decoders import with_windows
from graphengine import EngineConfig
from graphengine.buckets import OutOfBudget, format_bytes
from graphengine.demo import checkpoint_path
from graphengine.drafters import make_drafter
from graphengine.host.rings import WindowRing
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.families.registry import read_model_config
from graphengine.opening.allocation import allocate
from graphengine.opening.budget import memory_plan as memory
from graphengine.opening.budget.memory_plan import MemoryPlan, plan_memory
from graphengine.speculative import DraftModel, NGram

DEMO = Checkpoint.open(checkpoint_path())
MODEL = read_model_config(DEMO.config)
SIZES: dict[str, Any] = {
    "max_batch": 3, "max_seq_len": 1000, "block_size": 8, "prefill_buckets": (16,),
    "swap_blocks": 0, "memory_fraction": 1.0,
}  # fmt: skip
LAYERS = MODEL.num_layers
ALL, SOME = (20,) * LAYERS, (0, 20, 0, 50, 0, 50, 0)
# Windows of 20 and of 50 tokens and a chunk of 16 lie in so many blocks.
RINGS = (WindowRing(20, (1,), 5), WindowRing(50, (3, 5), 9))


def planned(windows: tuple[int, ...], **options: Any) -> MemoryPlan:
    config = EngineConfig(device="cpu", **SIZES | options)
    drafter = make_drafter(config, DEMO, MODEL)
    model = with_windows(MODEL, windows)
    return plan_memory(model, config, checkpoint_dtype=torch.bfloat16, drafter=drafter)


def lines(plan: MemoryPlan) -> dict[str, int]:
    return {line.name: line.bytes for line in plan.budget.lines}


def test_layers_have_rings_and_the_pool_the_others() -> None:
    whole, plan = planned(SOME, window_rings=False), planned(SOME)
    assert plan.rings == RINGS and whole.rings == ()
    layer = whole.block_bytes // LAYERS
    assert plan.block_bytes == layer * (LAYERS - 3)
    assert plan.ring_bytes == layer * (5 + 2 * 9)
    assert plan.kv_blocks == whole.kv_blocks == 3 * 125
    budget = lines(plan)
    for ring in RINGS:
        name = (
            f"KV of window {ring.window} (3 rings of {ring.blocks} blocks of 8 tokens, and a dummy)"
        )
        assert budget[name] == (3 * ring.blocks + 1) * len(ring.layers) * layer
    # What is saved, less the tables.
    saved = whole.budget.total("host") - plan.budget.total("host")
    blocks = sum(3 * (125 - ring.blocks) * len(ring.layers) for ring in RINGS)
    assert 0.9 * blocks * layer < saved < blocks * layer
    described = plan.describe_kv()
    assert described.startswith(f"KV takes {format_bytes(125 * plan.block_bytes)} per 1,000 tokens")
    assert "; each slot keeps 40 tokens of 1 layer with a window of 20, 72 tokens of" in described
    size = format_bytes(plan.ring_bytes)
    assert described.endswith(f"72 tokens of 2 layers with a window of 50, in {size}")


def test_with_windows_everywhere_the_length_costs_nothing() -> None:
    plans = [planned(ALL, max_seq_len=length) for length in (200, 1000)]
    for plan in plans:
        assert plan.rings == (WindowRing(20, tuple(range(LAYERS)), 5),)
        assert plan.block_bytes == plan.kv_bytes(1000) == 0
        assert not any(name.startswith("KV cache") for name in lines(plan))
        # No request waits for blocks, whatever was asked for.
        assert planned(ALL, max_seq_len=plan.max_seq_len, kv_blocks=100).whole_requests == 3
        assert "KV takes no more for longer requests: the slots hold 3 of 3" in plan.describe_kv()
    short, long = (
        sum(size for name, size in lines(plan).items() if name.startswith("KV")) for plan in plans
    )
    assert short == long


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({"prefix_caching": True}, []),
        ({"window_rings": False}, []),
        # No shorter than the longest request.
        ({"max_seq_len": 40}, []),
        ({"max_seq_len": 41}, [5]),
        # A shared pool may be smaller than a ring for each slot.
        ({"kv_blocks": 14}, []),
        ({"kv_blocks": 15}, [5]),
        # A launch's tokens: of a chunk, or of a row with its drafts.
        ({"max_prefill_tokens_per_step": 8, "prefill_buckets": (4, 16)}, [4]),
        ({"prefill_buckets": (1,), "speculative": NGram(k=8)}, [4]),
    ],
    ids=str,
)
def test_rings_are_for_those_whom_they_serve(options: dict[str, Any], blocks: list[int]) -> None:
    windows = (20, *(0,) * (LAYERS - 1))
    assert [ring.blocks for ring in planned(windows, **options).rings] == blocks


def test_what_does_not_fit_without_rings_may_fit_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = planned(ALL)
    monkeypatch.setattr(memory, "available_host_bytes", lambda: plan.budget.total("host"))
    with pytest.raises(OutOfBudget, match="max_seq_len=1000: the KV of one request needs 125"):
        planned(ALL, window_rings=False)
    assert planned(ALL).rings == plan.rings
    monkeypatch.setattr(memory, "available_host_bytes", lambda: plan.budget.total("host") - 1)
    with pytest.raises(OutOfBudget, match=r"(?s)short\n.*KV of window 20 \(3 rings of 5 blocks"):
        planned(ALL)


@pytest.mark.parametrize("windows", [ALL, SOME], ids=["all", "some"])
@pytest.mark.parametrize("drafts", [None, DraftModel(checkpoint_path(), k=2)], ids=["", "model"])
def test_what_is_planned_is_allocated(windows: tuple[int, ...], drafts: DraftModel | None) -> None:
    config = EngineConfig(device="cpu", speculative=drafts, **SIZES | {"swap_blocks": 7})
    drafter = make_drafter(config, DEMO, MODEL)
    model = with_windows(MODEL, windows)
    plan = plan_memory(model, config, checkpoint_dtype=torch.float32, drafter=drafter)
    weights = model.allocate(device="cpu", dtype=plan.dtype)
    drafter.allocate(plan.device, plan.dtype, config.family, config.chain_family)
    held = allocate(weights.open(max_seq_len=plan.max_seq_len), plan, config, drafter)
    rings, budget = held.program.states.rings, lines(plan)
    assert len(rings) == len(plan.rings) > 0
    planned_bytes = sum(size for name, size in budget.items() if name.startswith("KV"))
    pool = sum(cache.nbytes for cache, _ in held.caches)
    assert planned_bytes == pool + sum(ring.cache.nbytes for ring in rings)
    paged = held.program.states.paged()
    tables = [held.buffers[ring.table] for ring in plan.rings]
    for index, (_, table) in enumerate(paged):
        expected = [
            each for ring, each in zip(plan.rings, tables, strict=True) if index in ring.layers
        ]
        assert table is (expected[0] if expected else held.buffers["block_table"])
    assert len({cache.data_ptr() for cache, _ in paged}) == LAYERS
