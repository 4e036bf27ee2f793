"""The captured speculative step: poison around it, replay against eager, and what a replay costs.

An engine is brought to the brink of a step, all that the step can see is copied, and the step is
run from that state clean and poisoned. "Equal" means equal bits.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.mtp_modules import VOCAB, write_random
from engines.named_graphs import graph_names, graph_of
from engines.speculation import DEMO, open_speculating, write_draft_model
from graphengine import DynamicTree, Engine, Request, SamplingParams
from graphengine.buckets import inspect_graph, programmatic_edges
from graphengine.profiles.benchmark.eager import check_against_eager
from graphengine.sampling_params import SAMPLER_FIELDS
from graphengine.speculative import MTP, DraftModel, NGram, Speculative, UserProvided

Tensors = dict[str, torch.Tensor]
HUGE = {torch.int32: 2**31 - 1, torch.int64: 2**63 - 1}
K, BLOCK_SIZE, ROWS = 3, 8, 4

# Of K nodes.
SMALL_TREE = [[0], [1], [0, 0]]
SMALL_BEST = DynamicTree(nodes=K, top_k=2, depth=2)
DEMO_MODES: dict[str, Speculative] = {
    "mtp": MTP(k=K),
    "tree": MTP(tree=SMALL_TREE),
    "dynamic": MTP(tree=SMALL_BEST),
    "ngram": NGram(k=K),
    "model": DraftModel(DEMO, k=K),
}
MODES: dict[str, Callable[[Path], Speculative]] = {
    "mtp": lambda folder: MTP(k=K),
    "tree": lambda folder: MTP(tree=SMALL_TREE),
    "dynamic": lambda folder: MTP(tree=SMALL_BEST),
    "ngram": lambda folder: NGram(k=K),
    "model": lambda folder: DraftModel(
        write_draft_model(folder / "draft", "llama", VOCAB, None), k=K
    ),
    "user": lambda folder: UserProvided(K),
}
SLOT_FIELDS = (
    "block_table", *SAMPLER_FIELDS, "stop_ids", "min_len", "max_len",
    "next_token", "kv_len", "draft_tokens", "token_history", "relaxed_delta",
    "ngram_unmatched", "tree_parent", "tree_depth", "tree_ancestor",
)  # fmt: skip
STATE = ("next_token", "kv_len", "running")


def open_small(device: str, tmp_path: Path, name: str, **options: Any) -> Engine:
    """Four slots of a random checkpoint with modules."""
    path = write_random(tmp_path / "modules", "qwen3")
    options = {"max_batch": ROWS, "lookahead": 0, "dtype": "float32"} | options
    return open_speculating(MODES[name](tmp_path), path, device=device, **options)


def settle(engine: Engine) -> None:
    if engine.runtime.stream is not None:
        engine.runtime.stream.synchronize()


def visible(engine: Engine) -> Tensors:
    """Every tensor that a step can write, and those that it must not."""
    tensors = {
        field.name: engine.runtime.buffers[field.name] for field in engine.runtime.buffers.fields
    }
    caches = {f"cache {index}": cache for index, (cache, _) in enumerate(engine.runtime.caches)}
    return tensors | caches | {"mailbox": engine.runtime.mailbox.tensor}


def snapshot(engine: Engine) -> Tensors:
    settle(engine)
    copies = {name: tensor.clone() for name, tensor in visible(engine).items()}
    settle(engine)
    return copies


def restore(engine: Engine, saved: Tensors) -> None:
    settle(engine)
    for name, tensor in visible(engine).items():
        tensor.copy_(saved[name])
    settle(engine)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    as_bytes = [tensor.flatten().view(torch.uint8) for tensor in (left, right)]
    return torch.equal(*as_bytes)


def places(engine: Engine, request: Request, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and offset of positions 0 .. end - 1."""
    position = torch.arange(end, device=engine.memory.device)
    blocks = torch.tensor(request.job.placed.blocks, device=engine.memory.device)
    return blocks[position // BLOCK_SIZE], position % BLOCK_SIZE


def caches_of(engine: Engine, state: Tensors) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in state.items() if name.startswith("cache ")]


def decode_some(engine: Engine) -> list[Request]:
    """Three requests in the middle of decoding, the second of which is then cancelled."""
    dice = random.Random(1)
    requests = []
    for index, length in enumerate((21, 9, 30)):
        words = [dice.randrange(VOCAB) for _ in range(4)]
        prompt = [words[i % 4] for i in range(length)]
        params = SamplingParams(
            temperature=0.0 if index != 2 else 0.5, seed=5, max_tokens=60, ignore_eos=True
        )
        requests.append(engine.submit(prompt, params))
    while not all(len(request.token_ids) > 4 for request in requests):
        for request in requests if engine.core.needs.host_drafts else ():
            engine.draft(request, request.prompt_token_ids[:K])
        engine.step()
    requests[1].cancel()
    engine.step()
    assert not any(request.finished for request in requests[::2])
    return requests[::2]


def poison(engine: Engine, rows: list[Request], known: dict[int, int], clean: Tensors) -> None:
    """NaN and huge integers wherever a step with these rows has no business.

    That is free slots, free blocks, what lies after the known positions of the live slots, and
    what was of rejected drafts: in the target's cache, in the drafter's and in its table of tokens.
    """
    live = {request.job.placed.slot: request for request in rows}
    fields = {field.name for field in engine.runtime.buffers.fields}
    for name in SLOT_FIELDS:
        if name not in fields:
            continue
        tensor = engine.runtime.buffers[name]
        for slot in {*range(ROWS)} - live.keys():
            tensor[slot] = float("nan") if tensor.is_floating_point() else HUGE[tensor.dtype]
    for slot, request in live.items():
        engine.runtime.buffers["block_table"][slot, len(request.job.placed.blocks) :] = HUGE[
            torch.int32
        ]
        if "token_history" in fields:
            # The token at kv_len is the last one said.
            engine.runtime.buffers["token_history"][slot, known[slot] + 1 :] = HUGE[torch.int32]
    for slot in {*range(ROWS)} - live.keys():
        engine.runtime.buffers["running"][slot] = 1
    for name in (
        "prefill_tokens",
        "prefill_slot",
        "prefill_start",
        "prefill_count",
        "prefill_next",
    ):
        engine.runtime.buffers[name].fill_(HUGE[torch.int32])
    engine.runtime.buffers["swap_pairs"].fill_(HUGE[torch.int32])
    for name, cache in caches_of(engine, visible(engine)):
        cache.fill_(float("nan"))
        for slot, request in live.items():
            block, offset = places(engine, request, known[slot])
            cache[:, block, :, offset] = clean[name][:, block, :, offset]


@pytest.mark.parametrize("padding", ["empty", "stopped"])
@pytest.mark.parametrize("sampler", ["fast", "full"])
@pytest.mark.parametrize("drafts", [K, 0])
@pytest.mark.parametrize("name", MODES)
def test_poison_around_a_speculative_step(
    device: str, tmp_path: Path, name: str, drafts: int, sampler: str, padding: str
) -> None:
    with open_small(device, tmp_path, name) as engine:
        rows = decode_some(engine)
        for request in rows if name == "user" else ():
            engine.draft(request, request.prompt_token_ids[:K])
        engine.scheduler.width = 1 + drafts
        plan = engine.scheduler.plan()
        assert plan is not None and list(plan.rows) == rows and plan.prefill is None
        with engine.runtime.on_stream():
            engine.core.load(plan)
            before = snapshot(engine)
            known = {
                request.job.placed.slot: int(before["kv_len"][request.job.placed.slot])
                for request in rows
            }
            engine.runtime.program.decode(ROWS, sampler, drafts)
            clean = snapshot(engine)

            restore(engine, before)
            poison(engine, rows, known, before)
            dead = sorted({*range(ROWS)} - known.keys())
            if padding == "stopped":
                # As after a lookahead: planned by the host, and ended on the device.
                for row, slot in zip(range(len(rows), ROWS), dead, strict=True):
                    engine.runtime.buffers["slot_of_row"][row] = slot
                    engine.runtime.buffers["running"][slot] = 0
            poisoned = snapshot(engine)
            engine.runtime.program.decode(ROWS, sampler, drafts)
            after = snapshot(engine)

        own = {"token_history", "ngram_unmatched"} & clean.keys()
        advanced = 0
        for request in rows:
            slot = request.job.placed.slot
            for field in (*STATE, "draft_tokens", *own):
                end = int(clean["kv_len"][slot]) + 1 if field == "token_history" else None
                got, expected = (state[field][slot, ...] for state in (after, clean))
                if end is not None:
                    got, expected = got[:end], expected[:end]
                assert same_bits(got, expected), f"{field} of slot {slot}: {got} {expected}"
            end = int(clean["kv_len"][slot])
            advanced += end - known[slot]
            block, offset = places(engine, request, end)
            for cache, tensor in caches_of(engine, after):
                # The drafter's own last row may wait for the next step.
                upto = end if cache == "cache 0" else known[slot]
                got, expected = (
                    each[:, block[:upto], :, offset[:upto]] for each in (tensor, clean[cache])
                )
                assert same_bits(got, expected), f"{cache} of slot {slot}"
                assert bool(got.isfinite().all())
        assert advanced >= len(rows)
        assert same_bits(after["mailbox"], clean["mailbox"])

        # Of what is nobody's, nothing was written.
        for field in ("draft_tokens", *STATE, *own):
            for slot in dead:
                assert same_bits(after[field][slot, ...], poisoned[field][slot, ...]), (
                    f"{field} of the free slot {slot}"
                )
        held = {block for request in rows for block in request.job.placed.blocks}
        free = [block for block in range(1, engine.memory.kv_blocks + 1) if block not in held]
        for cache, tensor in caches_of(engine, after):
            assert bool(tensor[:, free].isnan().all()), f"{cache}: a free block was written"


@pytest.mark.parametrize("chunk", ["first", "last"])
@pytest.mark.parametrize("name", MODES)
def test_poison_around_a_prompt_chunk(device: str, tmp_path: Path, name: str, chunk: str) -> None:
    """The drafter's share of a prefill step: lanes after the chunk, other slots, free blocks."""
    with open_small(device, tmp_path, name) as engine:
        others = decode_some(engine)
        dice = random.Random(4)
        newcomer = engine.submit(
            [dice.randrange(VOCAB) for _ in range(39)], SamplingParams(temperature=0.0)
        )
        if chunk == "last":
            engine.step()
        plan = engine.scheduler.plan()
        assert plan is not None and plan.prefill is not None
        part = plan.prefill
        assert part.request is newcomer and part.final is (chunk == "last")
        slot, start, end = newcomer.job.placed.slot, part.start, part.start + part.count
        bucket = engine.memory.prefill_ladder.pick(part.count)
        with engine.runtime.on_stream():
            engine.core.load(plan)
            before = snapshot(engine)
            engine.runtime.program.prefill(bucket)
            clean = snapshot(engine)

            restore(engine, before)
            for field in SLOT_FIELDS:
                if field not in clean:
                    continue
                tensor = engine.runtime.buffers[field]
                for other in {*range(ROWS)} - {slot}:
                    value = float("nan") if tensor.is_floating_point() else HUGE[tensor.dtype]
                    tensor[other] = value
            engine.runtime.buffers["prefill_tokens"][part.count :] = HUGE[torch.int32]
            engine.runtime.buffers["draft_tokens"][slot] = HUGE[torch.int32]
            if "token_history" in clean:
                engine.runtime.buffers["token_history"][slot, start:] = HUGE[torch.int32]
            for cache, tensor in caches_of(engine, visible(engine)):
                tensor.fill_(float("nan"))
                block, offset = places(engine, newcomer, start)
                tensor[:, block, :, offset] = before[cache][:, block, :, offset]
            poisoned = snapshot(engine)
            engine.runtime.program.prefill(bucket)
            after = snapshot(engine)

        for field in (*STATE, *({"ngram_unmatched"} & clean.keys())):
            assert same_bits(after[field][slot, ...], clean[field][slot, ...]), field
        if part.final and name != "user":
            drafts = after["draft_tokens"][slot].tolist()
            assert drafts == clean["draft_tokens"][slot].tolist()
            assert all(0 <= draft < VOCAB for draft in drafts)
        if "token_history" in clean:
            upto = end + part.final
            got, expected = (state["token_history"][slot, :upto] for state in (after, clean))
            assert same_bits(got, expected)
        block, offset = places(engine, newcomer, end)
        for cache, tensor in caches_of(engine, after):
            got, expected = (each[:, block, :, offset] for each in (tensor, clean[cache]))
            assert same_bits(got, expected) and bool(got.isfinite().all()), cache
        for request in others:
            for field in ("draft_tokens", *STATE):
                other = request.job.placed.slot
                assert same_bits(after[field][other, ...], poisoned[field][other, ...]), field


@pytest.mark.parametrize("pdl", [pytest.param(True, marks=pytest.mark.gpu), False])
@pytest.mark.parametrize("name", DEMO_MODES)
def test_eager_steps_give_the_tokens_of_the_graphs(device: str, name: str, pdl: bool) -> None:
    with open_speculating(DEMO_MODES[name], device=device, pdl=pdl, max_batch=3) as engine:
        prompts = [engine.tokenizer.encode(text) for text in ("def f(", "import os\n" * 9, "x")]
        params = [
            SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
            SamplingParams(seed=1, max_tokens=17, ignore_eos=True),
            SamplingParams(seed=2, top_k=9, max_tokens=12, ignore_eos=True),
        ]
        found = check_against_eager(engine, prompts, params)
        assert [len(result.token_ids) for result in found] == [20, 17, 12]
        assert engine.acceptance.accepted > 0


# On a GPU alone.

REPLAYS = 300


def allocations() -> dict[str, int]:
    """Counters of torch's allocators, device and pinned, that only ever grow."""
    device = {f"device {key}": value for key, value in torch.cuda.memory_stats().items()}
    pinned = {f"pinned {key}": value for key, value in torch.cuda.host_memory_stats().items()}
    return {
        key: value
        for key, value in (device | pinned).items()
        if key.endswith((".allocated", ".freed")) or " num_" in key
    }


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("name", DEMO_MODES)
def test_speculative_steps_allocate_and_synchronise_nothing(name: str, lookahead: int) -> None:
    sizes: dict[str, Any] = {"max_batch": 4, "max_seq_len": 1600, "block_size": 16}
    with open_speculating(DEMO_MODES[name], device="cuda", lookahead=lookahead, **sizes) as engine:
        for seed in range(4):
            prompt = [100 + seed] * 20
            engine.submit(prompt, SamplingParams(seed=seed, max_tokens=1500, ignore_eos=True))
        while len(engine.scheduler.active) < 4 or not all(
            len(request.token_ids) >= 8 for request in engine.scheduler.active
        ):
            engine.step()
        graph = f"replays/decode/4/k{K}/fast"
        replays = engine.counters[graph]
        gc.collect()
        torch.cuda.synchronize()
        before, (free, _) = allocations(), torch.cuda.mem_get_info()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(REPLAYS):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        after, (free_after, _) = allocations(), torch.cuda.mem_get_info()
        changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
        assert not changed, f"allocator counters (before, after): {changed}"
        assert free_after == free
        assert engine.counters[graph] - replays == REPLAYS, dict(engine.counters)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize("name", DEMO_MODES)
def test_a_speculative_graph_is_one_chain_of_kernels(name: str, pdl: bool) -> None:
    """With a programmatic edge between any two; and so are those at K = 0."""
    pytest.importorskip("cuda.bindings.driver")
    with open_speculating(DEMO_MODES[name], device="cuda", pdl=pdl) as engine:
        names = [name for name in graph_names(engine) if name.startswith("decode/")]
        assert sum("/k3/" in graph for graph in names) * 2 == len(names)
        for graph in names:
            captured = graph_of(engine, graph)
            assert captured.graph is not None
            structure = inspect_graph(captured.graph)
            shown = f"{graph}, {pdl=}\n{structure}"
            kernels = captured.report.nodes
            assert structure.count() == {"kernel": kernels}, shown
            edges = [(edge.source, edge.target) for edge in structure.edges]
            assert edges == list(pairwise(range(kernels))), shown
            programmatic = kernels - 1 if pdl else 0
            assert programmatic_edges(captured.graph) == (programmatic, kernels - 1), shown
