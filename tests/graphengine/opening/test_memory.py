"""The memory budget against what is allocated, and swap that is not asked for."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from checkpoints.small_decoders import composed
from engines.small_engine import open_engine
from graphengine import EngineConfig
from graphengine.buckets import OutOfBudget, format_bytes
from graphengine.demo import checkpoint_path
from graphengine.drafters import NoDrafter, make_drafter
from graphengine.kernels.comm.push_lanes import ExpertLanes
from graphengine.kernels.core.devices import H200, Device, assumed
from graphengine.kernels.linear.call import MAX_LANES
from graphengine.kernels.linear.packed import packed_form
from graphengine.kernels.linear.quantised import WeightFormat
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.families.registry import read_model_config
from graphengine.models.linears import WeightForms
from graphengine.models.plans import plan_limits
from graphengine.opening import calibration, requirements
from graphengine.opening.allocation import Allocation, allocate
from graphengine.opening.budget import memory_plan as memory
from graphengine.opening.budget.cache_budget import BlockBytes, _fitting_swap, _needed_swap
from graphengine.opening.budget.host_memory import host_bytes
from graphengine.opening.budget.memory_plan import MemoryPlan, plan_memory
from graphengine.opening.budget.workspace import most_groups
from graphengine.opening.calibration import calibrate
from graphengine.options.drafts.draft_vocabulary import DraftVocabulary
from graphengine.profiles.benchmark.shapes import Subject
from graphengine.speculative import (
    MTP,
    DraftModel,
    GateOptions,
    NGram,
    RelaxedAcceptance,
    SaveHiddenStates,
    UserProvided,
)

DEMO = Checkpoint.open(checkpoint_path())
MODEL = read_model_config(DEMO.config)
INT8 = WeightFormat("int8", 1, 0)
THINKING = RelaxedAcceptance(begin_token_ids=[5], end_token_ids=[6, 7])


def planned(**options: Any) -> MemoryPlan:
    config = EngineConfig(device="cpu", **options)
    drafter = make_drafter(config, DEMO, MODEL)
    return plan_memory(MODEL, config, checkpoint_dtype=torch.bfloat16, drafter=drafter)


def sizes(plan: MemoryPlan) -> dict[str, int]:
    return {line.name.split(" (")[0]: line.bytes for line in plan.budget.lines}


@pytest.fixture(scope="module")
def old_objects_apart() -> Iterator[None]:
    """Python's collector, and so `storages`, looks only at what these tests make."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def storages() -> dict[int, int]:
    """Bytes of every tensor's storage by its address."""
    found = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.numel()]
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in found
        if tensor.device.type == "cpu"
    }


@pytest.mark.usefixtures("old_objects_apart")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_stop_ids": 1024, "max_logit_bias": 4096, "max_batch": 16, "lookahead": 0},
        {"max_logprobs": 20, "prompt_logprobs": True, "kv_blocks": 20, "swap_blocks": 33},
        {"speculative": MTP(k=3), "relaxed_acceptance": THINKING, "max_seq_len": 100},
        {"speculative": MTP(k=2), "kv_blocks": 9, "prefill_buckets": (8, 24)},
        {"speculative": MTP(k=1, style="vanilla"), "max_bad_words": 1024},
        {"speculative": NGram(k=31), "max_batch": 2, "max_stop_sequences": 64},
        {"speculative": UserProvided(k=5)},
        {"prompt_embeds": True, "speculative": MTP(k=2)},
        {"speculative": MTP(k=3), "kv_dtype": "fp8", "kv_blocks": 20, "swap_blocks": 33},
        {"speculative": DraftModel(checkpoint_path(), k=2), "kv_blocks": 30},
        {"speculative": "d2t"},
        {"speculative": "hidden"},
    ],
    ids=str,
)
def test_the_budget_holds_all_that_is_allocated(options: dict[str, Any], tmp_path: Any) -> None:
    text = tmp_path / "text"
    text.write_text("def read_lines(path): return open(path)", encoding="utf-8")
    named = {
        "d2t": MTP(k=2, draft_vocab=DraftVocabulary(text=text, size=40)),
        "hidden": SaveHiddenStates(tmp_path, layers=[0, 1]),
    }
    options = {"max_batch": 3, "block_size": 8, "prefill_buckets": (8, 32)} | options
    if isinstance(options.get("speculative"), str):
        options["speculative"] = named[options["speculative"]]
    config = EngineConfig(device="cpu", max_seq_len=options.pop("max_seq_len", 128), **options)
    drafter = make_drafter(config, DEMO, MODEL)
    plan = plan_memory(MODEL, config, checkpoint_dtype=torch.bfloat16, drafter=drafter)
    said = sizes(plan)

    before = storages()
    weights = MODEL.allocate(device="cpu", dtype=plan.dtype)
    drafter.allocate(plan.device, plan.dtype, config.family, config.chain_family)
    model = weights.open(max_seq_len=plan.max_seq_len)
    held = allocate(model, plan, config, drafter)
    made = {at: size for at, size in storages().items() if at not in before}

    buffers = held.buffers
    assert said["staging"] >= buffers.staging_nbytes > 0
    assert said["images of what the host owns"] >= buffers.staging_nbytes // config.staging_blocks
    drafts = 4 * config.max_batch * (plan.tokens_per_step - 1)
    assert said["mailbox"] == held.mailbox.tensor.nbytes + drafts
    mailboxes = [held.logprobs.tokens, held.logprobs.prompts]
    assert said["log-probabilities"] == sum(each.tensor.nbytes for each in mailboxes if each)
    apart = ("request options", "drafter's state", "prompt embeddings")
    own = [said[name] for name in said if name in apart]
    on_device = said["state and tables"] + sum(own)
    assert buffers.nbytes <= on_device < 1.1 * buffers.nbytes + 2 * 2**20
    assert said["swap"] == sum(area.nbytes for _, area in held.caches)
    assert said["KV cache"] == sum(cache.nbytes for cache, _ in held.caches)
    assert said["weights"] == weights.nbytes
    # What is no tensor, and what only a step takes, cannot make up for anything.
    other = ("images of what the host owns", "workspace", "graphs")
    lines = sum(size for name, size in said.items() if name not in other)
    assert 0.8 * lines < sum(made.values()) <= lines
    assert held.masks is not None


def test_fp8_is_half_the_bytes_of_a_block_and_twice_the_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compared with 16 bits, in memory where neither is all that the slots could use; the swap as
    well.
    """
    options = {"dtype": "bfloat16", "max_batch": 4, "speculative": MTP(k=1)}
    held = {
        kind: sizes(planned(kv_dtype=kind, kv_blocks=9, swap_blocks=8, **options))
        for kind in ("auto", "fp8")
    }
    for name in ("KV cache", "swap"):
        assert held["auto"][name] == 2 * held["fp8"][name] > 0
    others = {name for name in held["auto"] if name not in ("KV cache", "swap")}
    assert all(held["auto"][name] == held["fp8"][name] for name in others)

    room = sum(size for name, size in held["auto"].items() if name != "swap") + 10 * 2**20
    monkeypatch.setattr(memory, "available_bytes", lambda device: room)
    wide, narrow = (
        planned(kv_dtype=kind, memory_fraction=1.0, **options) for kind in ("auto", "fp8")
    )
    assert 2 * wide.kv_blocks <= narrow.kv_blocks <= 2 * wide.kv_blocks + 2
    assert narrow.kv_blocks < 4 * narrow.table_blocks
    assert f"KV cache ({narrow.kv_blocks} fp8 blocks of 16 tokens" in narrow.budget.table()


@pytest.mark.usefixtures("old_objects_apart")
@pytest.mark.parametrize("speculative", [None, MTP(k=2), "model"], ids=str)
def test_the_kv_that_calibrates_is_in_the_budget_and_freed(
    monkeypatch: pytest.MonkeyPatch, speculative: Any
) -> None:
    """In float32 it takes four times the bytes of e4m3, and there is but one slot."""
    if speculative == "model":
        speculative = DraftModel(checkpoint_path(), k=2)
    options = {"device": "cpu", "max_seq_len": 128, "max_batch": 1, "prefill_buckets": (8, 32)}
    ids = tuple(range(90))
    config = EngineConfig(
        kv_dtype="fp8", kv_calibration=ids, block_size=8, speculative=speculative, **options
    )
    drafter = make_drafter(config, DEMO, MODEL)
    plan = plan_memory(
        MODEL, config, checkpoint_dtype=torch.bfloat16, drafter=drafter, calibration_tokens=len(ids)
    )
    said = sizes(plan)
    assert "calibration (KV of 90 tokens in float32, beyond the caches)" in plan.budget.table()

    gc.collect()
    before = storages()
    weights = MODEL.allocate(device="cpu", dtype=plan.dtype)
    wanted = drafter.allocate(plan.device, plan.dtype, config.family, config.chain_family)
    DEMO.load(weights.named() | wanted)
    del wanted
    model = weights.open(max_seq_len=plan.max_seq_len)
    loaded, peak, caches = storages(), [], []
    prefill = calibration._prefill

    def watched(held: Allocation, plan: MemoryPlan, ids: Sequence[int]) -> None:
        prefill(held, plan, ids)
        caches.append(sum(cache.nbytes for cache, _ in held.caches))
        peak.append(sum(size for at, size in storages().items() if at not in before))

    monkeypatch.setattr(calibration, "_prefill", watched)
    # What is freed only by Python's collector is there when the caches are allocated.
    gc.disable()
    try:
        calibrate(model, plan, config, drafter, ids)
        assert storages() == loaded
    finally:
        gc.enable()
    assert caches == [said["KV cache"] + said["calibration"]] and said["calibration"] > 0
    other = ("images of what the host owns", "workspace", "graphs")
    assert peak[0] <= sum(size for name, size in said.items() if name not in other)


def test_a_calibration_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the pool and the swap hold as many bytes, it needs no others."""
    options = {
        "kv_dtype": "fp8", "kv_blocks": 25, "block_size": 8, "max_batch": 2, "max_seq_len": 128,
        "memory_fraction": 1.0,
    }  # fmt: skip

    def plan(tokens: int, swap_blocks: int) -> MemoryPlan:
        config = EngineConfig(device="cpu", swap_blocks=swap_blocks, **options)
        return plan_memory(
            MODEL,
            config,
            checkpoint_dtype=torch.bfloat16,
            drafter=NoDrafter(),
            calibration_tokens=tokens,
        )

    block = plan(0, 0).block_bytes
    assert "calibration" not in sizes(plan(0, 0))
    # Each block of the prompt takes four; one of them is the dummy, as in the pool.
    for tokens, swap_blocks, beyond in ((43, 0, 2), (48, 2, 0), (48, 1, 1), (40, 0, 0), (1, 0, 0)):
        assert sizes(plan(tokens, swap_blocks))["calibration"] == beyond * block, tokens
    whole = plan(100, 0).budget.total("host")
    available(monkeypatch, whole)
    assert plan(100, 0).budget.total("host") == whole
    available(monkeypatch, whole - 1)
    with pytest.raises(OutOfBudget, match=r"1 B short\n(.*\n)*calibration \(KV of 100 tokens in"):
        plan(100, 0)


@pytest.mark.parametrize("option", ["kv_dtype", "activations"])
def test_fp8_needs_a_gpu_that_converts_it(option: str) -> None:
    requirements.check_fp8(option, torch.device("cpu"))
    message = f"{option}='fp8' needs a GPU of compute capability 8.9 or more: cpu has 8.6"
    with (
        assumed(Device((8, 6), processors=82, shared_bytes=99 * 1024)),
        pytest.raises(ValueError, match=message),
    ):
        requirements.check_fp8(option, torch.device("cpu"))


def test_what_a_gpu_does_not_multiply_is_refused_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Packed weights in float32, and those of odd columns; a CPU takes both."""
    down = "model.layers.2.mlp.down_proj"
    packed = MODEL.stored_as(WeightForms({down: packed_form(INT8, torch.float32)}))
    odd = composed(packed).with_blocks(
        lambda block: replace(block, ffn_size=556) if isinstance(block, Swiglu) else block
    )
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for model, dtype, message in (
        (
            packed,
            torch.float32,
            r"dtype=torch.float32: with packed weights \(down.int8-1x0\) a GPU",
        ),
        (odd, torch.bfloat16, "down.int8-1x0 is packed, with 556 columns: a GPU takes a multiple"),
    ):
        requirements.check_packed(model, cpu, dtype)
        with pytest.raises(ValueError, match=message):
            requirements.check_packed(model, gpu, dtype)
    requirements.check_packed(packed, gpu, torch.float16)
    requirements.check_packed(MODEL, gpu, torch.float32)
    asked: list[object] = []
    monkeypatch.setattr(requirements, "check_packed", lambda *given: asked.append(given))
    planned(dtype="float16")
    assert asked == [(MODEL, cpu, torch.float16)]


def test_what_a_gpu_needs_to_feed_several_prompts() -> None:
    """Hopper and 16 bits; columns and rows of plain weights in multiples of 8."""
    config, cpu = EngineConfig(prompts_per_prefill=2), torch.device("cpu")
    odd = composed(MODEL).with_blocks(
        lambda block: replace(block, ffn_size=556) if isinstance(block, Swiglu) else block
    )
    older = Device((8, 6), processors=82, shared_bytes=99 * 1024)
    needs = "prompts_per_prefill=2 needs a GPU of compute capability 9.0 and 16 bits: cpu has "
    for model, device, dtype, message in (
        (MODEL, older, torch.bfloat16, f"{needs}8.6, and dtype=torch.bfloat16"),
        (MODEL, H200, torch.float32, f"{needs}9.0, and dtype=torch.float32"),
        (odd, H200, torch.float16, "=2: down has 256 rows and 556 columns, and a GPU takes mul"),
    ):
        requirements.check_packing(model, config, NoDrafter(), cpu, dtype)
        with assumed(device), pytest.raises(ValueError, match=message):
            requirements.check_packing(model, config, NoDrafter(), cpu, dtype)

    class OddDrafter(NoDrafter):
        chunk_linears = odd.linears  # type: ignore[assignment]

    refused = "=2: the drafter's down has 256 rows and 556 columns, and a GPU takes mul"
    requirements.check_packing(MODEL, config, OddDrafter(), cpu, torch.float16)
    with assumed(H200), pytest.raises(ValueError, match=refused):
        requirements.check_packing(MODEL, config, OddDrafter(), cpu, torch.float16)
    downs = [f"model.layers.{layer}.mlp.down_proj" for layer in range(MODEL.num_layers)]
    forms = WeightForms(dict.fromkeys(downs, packed_form(INT8, torch.float32)))
    with assumed(H200):
        requirements.check_packing(MODEL, config, NoDrafter(), cpu, torch.float16)
        # `check_packed` is for these.
        requirements.check_packing(odd.stored_as(forms), config, NoDrafter(), cpu, torch.float16)


@pytest.mark.parametrize("mode", [None, MTP(k=2)], ids=str)
def test_larger_token_buckets_are_in_the_budget(mode: Any) -> None:
    """By the lane: the stream in float32, what layers compute in, and what modules read."""
    options = {"speculative": mode, "max_seq_len": 2048, "dtype": "bfloat16"}
    plans = [planned(prefill_buckets=(16, largest), **options) for largest in (512, 1024, 2048)]
    found = [sizes(plan) for plan in plans]
    kept = 4 if mode else 1
    lane = 4 * MODEL.hidden_size + 2 * (kept * MODEL.hidden_size + MODEL.prefill_width)
    for few, many, more in zip(found, found[1:], (512, 1024), strict=False):
        assert many["workspace"] - few["workspace"] == more * lane
        # Their ids, beside fields that do not change.
        assert many["staging"] - few["staging"] == 3 * 4 * more
    assert [plan.graphs[0].size for plan in plans] == [512, 1024, 2048]


@pytest.mark.parametrize("name", ["tiny-delta", "tiny-hybrid"])
def test_what_scans_leave_between_their_kernels_is_in_the_budget(name: str) -> None:
    """For a chunk: states of its pieces, one more than whole ones, and what tokens have."""
    model = Subject.of_shape(name).model
    found = []
    for largest in (256, 512):
        config = EngineConfig(
            device="cpu", prefill_buckets=(16, largest), max_seq_len=512, dtype="bfloat16"
        )
        plan = plan_memory(model, config, checkpoint_dtype=torch.bfloat16, drafter=NoDrafter())
        found.append(sizes(plan)["workspace"])
    lane = 4 * model.hidden_size + 2 * (model.hidden_size + model.prefill_width)
    scan = {
        # 4 heads of 16 x 16, and of a token 16 values of q, k, w and u, and 64 products.
        "tiny-delta": 4 * (4 * 4 * (16 * 16 + 1) + 256 * 4 * (4 * 16 + 64)),
        # 4 heads of 32 x 16.
        "tiny-hybrid": 4 * 4 * 4 * (32 * 16 + 1),
    }[name]
    assert found[1] - found[0] == 256 * lane + scan


def test_there_is_room_for_lanes_with_all_that_experts_read_of_them() -> None:
    least, _ = plan_limits._BLOCK_M["dot"]
    assert 2048 // least <= most_groups(2048)
    for dtype in (torch.float32, torch.bfloat16):
        widest = ExpertLanes(
            torch.empty(MAX_LANES, 2048, dtype=dtype, device="meta"),
            torch.empty(MAX_LANES, device="meta"),
            torch.empty(MAX_LANES, 8, device="meta"),
            torch.empty(MAX_LANES, 8, device="meta"),
            torch.empty(2048 // least, MAX_LANES, device="meta"),
        )
        assert widest.units == memory._units_of_lanes(2048, dtype, 8)


def test_pinned_memory_counts_as_torch_takes_it() -> None:
    """In powers of two: 33 GiB of swap would take 64."""
    assert [host_bytes(size, pinned=True) for size in (0, 1, 4095, 4096, 4097)] == [
        0, 1, 4096, 4096, 8192,
    ]  # fmt: skip
    assert host_bytes(4097, pinned=False) == 4097
    # Two areas of 3 and 1 bytes a block; of 64 bytes 16 blocks take all, and 17 take 96.
    block = BlockBytes(layers=(3,), rings=0, own=3, drafter=1)
    chosen = [_fitting_swap(40, block, most, pinned=True) for most in (-1, 3, 4, 80, 95, 96)]
    assert chosen == [0, 0, 0, 16, 16, 21]
    assert _fitting_swap(40, block, 10**9, pinned=True) == 40
    assert _fitting_swap(40, block, 80, pinned=False) == 20
    assert _needed_swap(slots=3, blocks=5, one=20) == 40
    assert _needed_swap(slots=3, blocks=60, one=20) == 0


def available(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Lets the host have so many bytes, all of which may be planned."""
    monkeypatch.setattr(memory, "available_host_bytes", lambda: size)


LONG = {
    "max_batch": 4, "max_seq_len": 1000, "block_size": 8, "memory_fraction": 1.0, "swap_blocks": 0,
}  # fmt: skip


@pytest.mark.parametrize("drafts", [None, MTP(k=1)], ids=str)
def test_a_pool_too_small_for_one_request_says_what_fits(
    monkeypatch: pytest.MonkeyPatch, drafts: MTP | None
) -> None:
    """With the drafter's cache. What the message proposes can be planned, and no block more."""
    whole = planned(**LONG, speculative=drafts)
    assert (whole.kv_blocks, whole.table_blocks) == (500, 125)
    block = whole.block_bytes
    assert block == sizes(whole)["KV cache"] // 501
    others = whole.budget.total("host") - 501 * block
    available(monkeypatch, others + 126 * block)
    assert planned(**LONG, speculative=drafts).kv_blocks == 125
    available(monkeypatch, others + 126 * block - 1)
    with pytest.raises(OutOfBudget, match="left for KV; max_seq_len=992 fits\n"):
        planned(**LONG, speculative=drafts)
    available(monkeypatch, others + 101 * block - 1)
    with pytest.raises(OutOfBudget) as caught:
        planned(**LONG, speculative=drafts)
    message, _, table = str(caught.value).partition("\n")
    thousand = format_bytes(125 * block)
    assert message == (
        f"max_seq_len=1000: the KV of one request needs 125 blocks of 8 tokens, {thousand} "
        f"({thousand} per 1,000 tokens), of max_batch=4 requests {format_bytes(500 * block)}; "
        f"beside the rest {format_bytes(101 * block - 1)} of host memory are left for KV; "
        f"max_seq_len=792 fits"
    )
    assert "KV cache (125 blocks of 8 tokens, and a dummy)" in table
    fitting = planned(**LONG | {"max_seq_len": 792}, speculative=drafts)
    assert fitting.kv_blocks >= fitting.table_blocks == 99


def test_where_not_even_a_block_fits_nothing_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = planned(**LONG)
    others = whole.budget.total("host") - 501 * whole.block_bytes
    available(monkeypatch, others)
    with pytest.raises(OutOfBudget, match="beside the rest 0 B of host memory are left for KV\n"):
        planned(**LONG)
    # Here it is not the KV that does not fit.
    available(monkeypatch, others - 1)
    with pytest.raises(OutOfBudget, match=r"host memory: .* planned, .* short\n"):
        planned(**LONG)


@pytest.mark.parametrize(
    ("blocks", "holds"),
    [
        (None, "4,000 tokens: 4 of 4 requests of max_seq_len 1,000"),
        (600, "4,800 tokens: 4 of 4 requests of max_seq_len 1,000"),
        (499, "3,992 tokens: 3 of 4 requests of max_seq_len 1,000, or 4 of 992 tokens"),
        (124, "992 tokens: 0 of 4 requests of max_seq_len 1,000, or 4 of 248 tokens"),
    ],
)
def test_the_plan_says_how_many_tokens_the_pool_holds(blocks: int | None, holds: str) -> None:
    plan = planned(**LONG, kv_blocks=blocks)
    thousand = format_bytes(125 * plan.block_bytes)
    assert plan.describe_kv() == f"KV takes {thousand} per 1,000 tokens; the pool holds {holds}"


def test_swap_stays_within_half_of_what_a_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    sized = {"max_batch": 8, "kv_blocks": 4, "max_seq_len": 128, "block_size": 8}
    whole = planned(**sized)
    assert whole.swap_blocks == 7 * 16
    block = sizes(whole)["swap"] // whole.swap_blocks
    used = whole.budget.total("host") - sizes(whole)["swap"]
    for left in (0.5, 3.0, 50.0):
        limit = int((used + left * block) / 0.9) + 1
        monkeypatch.setattr(memory, "available_host_bytes", lambda limit=limit: limit)
        plan = planned(**sized)
        assert plan.swap_blocks == int(left)
        assert plan.budget.total("host") <= 0.9 * limit + 1
    # A small share of a large host.
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 10 * whole.budget.total("host"))
    assert planned(**sized).swap_blocks == 112


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch": 3},
        {"max_batch": 1, "prompt_logprobs": True},
        {"max_batch": 4, "speculative": MTP(k=2), "max_live": 2},
        {
            "max_batch": 2,
            "speculative": NGram(k=2),
            "relaxed_acceptance": THINKING,
        },
    ],
    ids=["plain", "prompts", "drafts", "relaxed"],
)
def test_the_planned_graphs_are_those_that_are_captured(options: dict[str, Any]) -> None:
    """And as many as a budget counts; of a full step before the fast one that shares its memory."""
    max_live = options.pop("max_live", None)
    if max_live is not None:
        options["gate"] = GateOptions(max_live=max_live)
    with open_engine(device="cpu", **options) as engine:
        keys = engine.memory.graphs
        assert keys == tuple(engine.runtime.graphs)
        assert [key.name for key in keys] == [each.name for each in engine.report().captures]
        names = {key.name for key in keys}
        assert len(names) == len(keys)
    decode = [key for key in keys if key.kind == "decode"]
    assert [key.size for key in decode] == sorted((key.size for key in decode), reverse=True)
    variants = [key.variant for key in decode]
    if "relaxed_acceptance" in options:
        assert {*variants} == {"full"}
    else:
        assert variants == ["full", "fast"] * (len(decode) // 2)
    if max_live is not None:
        assert max(key.size for key in decode if key.drafts) <= max_live
