"""What kernels read and write: found in small kernels line by line, and in an engine's kernels
compared with what they do in Triton's interpreter and with machine code.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from graphengine import Engine, SamplingParams
from graphengine.kernels.core.accesses import Accesses, UnclearAccess, accesses_of
from graphengine.kernels.core.devices import H200, assumed
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.op import Op, ops_handed_to
from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.opening.allocation import graph_steps
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.shapes import Subject
from graphengine.program.launch_lists import record_schedule
from launches.compilation import compile_launch, global_accesses

POISONS = (0x5A, 0xA5)


class Pair(NamedTuple):
    first: Any
    second: Any


class Single(NamedTuple):
    first: Any


def found(kernel: Any, **arguments: Any) -> tuple[list[str], list[str]]:
    names = kernel.arg_names
    reads, writes, _, _ = accesses_of(kernel, {name: arguments[name] for name in names})
    return sorted(reads), sorted(writes)


def tensor() -> torch.Tensor:
    return torch.zeros(4)


# Small kernels.


@triton.jit
def _add(pair, at):
    return tl.load(pair.first + at), pair.second


@triton.jit
def _helped_kernel(x_ptr, pair, out_ptr, SCALED: tl.constexpr):
    at = tl.arange(0, 4)
    y, second_ptr = _add(pair, at)
    if SCALED:
        y *= tl.load(x_ptr + at)
    if second_ptr is not None:
        y += tl.load(second_ptr + at)
    tl.store(out_ptr + at, y)


def test_helpers_tuples_and_branches_that_are_compiled() -> None:
    x, out = tensor(), tensor()
    given = {"x_ptr": x, "out_ptr": out}
    both, one = Pair(tensor(), tensor()), Pair(tensor(), None)
    assert found(_helped_kernel, **given, pair=both, SCALED=True) == (
        ["pair.first", "pair.second", "x_ptr"], ["out_ptr"],
    )  # fmt: skip
    assert found(_helped_kernel, **given, pair=one, SCALED=tl.constexpr(0)) == (
        ["pair.first"], ["out_ptr"],
    )  # fmt: skip


@triton.jit
def _walking_kernel(count_ptr, a_ptr, b_ptr, lock_ptr, unused_ptr, peers_ptr, number):
    source = a_ptr
    for _ in range(number):
        if tl.load(count_ptr) > 0:
            source = b_ptr
        tl.store(source, 1.0)
        source += 1
    if tl.atomic_add(lock_ptr, 1) == 0:
        peer = tl.load(peers_ptr + number).to(tl.pointer_type(tl.float32))
        tl.store(peer + unused_ptr.dtype.element_ty.primitive_bitwidth, 2.0)


def test_either_branch_of_run_time_atomics_and_addresses_from_memory() -> None:
    names = ("count_ptr", "a_ptr", "b_ptr", "lock_ptr", "unused_ptr", "peers_ptr")
    assert found(_walking_kernel, **{name: tensor() for name in names}, number=3) == (
        ["count_ptr", "lock_ptr", "peers_ptr"], ["*peers_ptr", "a_ptr", "b_ptr", "lock_ptr"],
    )  # fmt: skip


@triton.jit
def _choosing_kernel(stream, other, out_ptr, WHICH: tl.constexpr):
    chosen = stream
    if tl.load(out_ptr) > 0:
        chosen = other
    tl.store(chosen.first, 0.0)


def test_fields_of_what_may_be_one_of_two_tuples_may_be_any() -> None:
    pair, single = Pair(tensor(), tensor()), Single(tensor())
    reads, writes = found(_choosing_kernel, stream=pair, other=single, out_ptr=tensor(), WHICH=0)
    assert reads == ["out_ptr"] and writes == ["other.first", "stream.first", "stream.second"]
    _, writes = found(_choosing_kernel, stream=pair, other=pair, out_ptr=tensor(), WHICH=0)
    assert writes == ["other.first", "stream.first"]


@triton.jit
def _early_kernel(x_ptr, y_ptr, out_ptr, MAYBE: tl.constexpr, PDL: tl.constexpr):
    x = tl.load(x_ptr)
    if MAYBE:
        if x > 0:
            wait_for_inputs(PDL)
    else:
        wait_for_inputs(PDL)
    tl.store(out_ptr, tl.load(y_ptr) + x)


def test_what_comes_before_the_wait_is_told_apart() -> None:
    given = {"x_ptr": tensor(), "y_ptr": tensor(), "out_ptr": tensor()}
    everything = {"x_ptr", "y_ptr"}, {"out_ptr"}
    early = accesses_of(_early_kernel, {**given, "MAYBE": False, "PDL": not INTERPRETED})
    if not INTERPRETED:
        assert early == (*everything, {"x_ptr"}, set())
    for maybe, pdl in ((True, not INTERPRETED), (False, False)):
        early = accesses_of(_early_kernel, {**given, "MAYBE": maybe, "PDL": pdl})
        assert early == (*everything, *everything)


@triton.jit
def _unclear_kernel(x_ptr):
    tl.store(x_ptr, tl.sum(x_ptr, 0))


def test_an_address_is_not_passed_to_what_is_not_known() -> None:
    message = r"test_accesses.py:\d+: _unclear_kernel passes an address .*: tl.sum\(x_ptr, 0\)"
    with pytest.raises(UnclearAccess, match=message):
        found(_unclear_kernel, x_ptr=tensor())


@triton.jit
def _assembled_kernel(x_ptr, out_ptr, other_ptr):
    word = tl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l", [x_ptr], tl.int32, False, 1
    )
    tl.inline_asm_elementwise(
        "st.global.b32 [$1], $2;", "=r,l,r", [out_ptr, word], tl.int32, False, 1
    )


@triton.jit
def _unclear_assembled_kernel(x_ptr):
    tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x_ptr], tl.int64, False, 1)


def test_inline_assembly_says_what_it_does_with_an_address() -> None:
    tensors = {name: tensor() for name in ("x_ptr", "out_ptr", "other_ptr")}
    assert found(_assembled_kernel, **tensors) == (["x_ptr"], ["out_ptr"])
    with pytest.raises(UnclearAccess, match="passes an address"):
        found(_unclear_assembled_kernel, x_ptr=tensor())


# The kernels of engines.


class Truth:
    """Launches each kernel as often as it takes to see what it reads and writes.

    wrong  kernels, and the arguments that are not as their source says
    """

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.kernels: Counter[str] = Counter()

    def launch(self, op: Op) -> None:
        self.kernels[op.name] += 1
        if self.kernels[op.name] > 1:
            op.launch()
            return
        names: dict[int, list[str]] = {}
        whole: dict[int, torch.Tensor] = {}
        for name, each in op.tensors():
            at = each.untyped_storage().data_ptr()
            names.setdefault(at, []).append(name)
            whole[at] = torch.empty(0, dtype=torch.uint8).set_(each.untyped_storage())
        before = {at: memory.clone() for at, memory in whole.items()}

        def run(poison: int | None = None) -> dict[int, torch.Tensor]:
            for at, memory in whole.items():
                unread = op.accesses.reads.isdisjoint(names[at])
                memory.copy_(before[at])
                if unread and poison is not None:
                    memory.fill_(poison)
            op.launch()
            return {at: memory.clone() for at, memory in whole.items()}

        poisoned, after = [run(poison) for poison in POISONS], run()
        for at, of_storage in names.items():
            written = not op.accesses.writes.isdisjoint(of_storage)
            if not written and not torch.equal(before[at], after[at]):
                self.wrong.append(f"{op.name} writes {of_storage}")
            first, second = (each[at] for each in poisoned)
            same = (first == after[at]) & (second == after[at])
            if op.accesses.reads.isdisjoint(of_storage):
                # Where nothing is written the poison remains.
                same |= (first == POISONS[0]) & (second == POISONS[1])
            if not same.all():
                self.wrong.append(f"{op.name} reads something that changes {of_storage}")


def serve(shape: str, truth: Truth) -> None:
    sizes: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "max_batch": 2, "buckets": (2,), "max_seq_len": 64,
        "prefill_buckets": (8,), "lookahead": 0, "swap_blocks": 0,
    }  # fmt: skip
    engine, _ = build_engine(Subject.of_shape(shape), sizes)
    with engine, ops_handed_to(truth.launch):
        options = SamplingParams(max_tokens=2, temperature=0.7, seed=1, top_k=5, ignore_eos=True)
        engine.generate([1, 2, 3, 4, 5], options)


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels on the CPU")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("shape", ["tiny-moe", "tiny-hybrid"])
def test_interpreted_kernels_read_and_write_what_their_source_says(shape: str) -> None:
    truth = Truth()
    serve(shape, truth)
    assert len(truth.kernels) > 20 and truth.wrong == []


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels on the CPU")
@pytest.mark.parametrize("dropped", ["reads", "writes"])
def test_a_wrong_list_is_found(dropped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, out = torch.ones(4), torch.ones(4), torch.zeros(4)
    arguments = {"x_ptr": x, "pair": Pair(y, None), "out_ptr": out, "SCALED": True}
    op, truth = Op(_helped_kernel, (1,), arguments, {}), Truth()
    truth.launch(op)
    assert truth.wrong == []
    wrong = op.accesses._replace(**{dropped: frozenset[str]()})
    monkeypatch.setattr(Op, "accesses", wrong)
    truth.kernels.clear()
    out.zero_()
    truth.launch(op)
    assert truth.wrong


def recorded(engine: Engine) -> list[Op]:
    steps = graph_steps(engine.runtime.program, engine.memory)
    with assumed(H200):
        schedule = record_schedule(steps)
    return [op for ops in schedule.values() for op in ops]


@pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing")
def test_compiled_kernels_load_and_store_what_their_source_says() -> None:
    """Gluon's are not interpreted; TMA copies are not told apart in machine code."""
    engine, _ = build_engine(
        Subject.of_shape("tiny"),
        {"device": "cpu", "dtype": "bfloat16", "max_batch": 1, "buckets": (1,), "max_seq_len": 64,
         "prefill_buckets": (16,), "row_family": "dot", "pdl": False},
    )  # fmt: skip
    with engine:
        kernels = {op.name: op for op in recorded(engine) if op.kernel.is_gluon()}
    assert {"dot_kernel", "decode_attention_kernel"} <= kernels.keys()
    for name in ("dot_kernel", "decode_attention_kernel"):
        op = kernels[name]
        loads, stores = global_accesses(*compile_launch(op))
        accesses: Accesses = op.accesses
        assert loads == accesses.reads and stores == accesses.writes, name
