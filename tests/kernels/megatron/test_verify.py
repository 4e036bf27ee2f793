"""Verified drafts and the rows of the next step: both twins against a plain Python loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.megatron import verify as ops

HUGE, LOWEST = 2**31 - 1, -(2**31)
NATIVE = torch.cuda.is_available() and not INTERPRETED
SETTINGS = settings(deadline=None, max_examples=extent(20, 60), derandomize=not NATIVE)
INDEX_DTYPES = (torch.int32, torch.int64)
CANARY = 777


@dataclass(frozen=True)
class Ops:
    """One twin of every op, and the device it runs on."""

    device: str
    suffix: str

    def __getattr__(self, op: str) -> Callable[..., Any]:
        return getattr(ops, op + self.suffix)

    def ints(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype, device=self.device)

    def filled(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, CANARY, dtype=dtype, device=self.device)


# `public` runs the kernels on a GPU or in the interpreter, and elsewhere the twin it dispatches to.
@pytest.fixture(scope="module", params=["reference", "public"])
def twin(request: pytest.FixtureRequest) -> Ops:
    if request.param == "reference":
        return Ops("cpu", "_reference")
    return Ops("cuda" if NATIVE else "cpu", "")


def verify_loop(
    inputs: Sequence[int], outputs: Sequence[int], decode: int, prefill: int, drafts: int
) -> tuple[list[int], list[bool]]:
    mask, last = [False] * len(inputs), []
    for row in range(decode):
        first = row * (drafts + 1)
        mask[first] = True
        last.append(first)
        for j in range(1, drafts + 1):
            if inputs[first + j] != outputs[first + j - 1]:
                break
            mask[first + j] = True
            last[-1] += 1
    for row in range(prefill):
        last.append(decode * (drafts + 1) + row)
        mask[last[-1]] = True
    return last, mask


# K = 2 with 1, 2 and 0 drafts accepted, then two prompts: a5 is 105, b3 is 203, and so on.
INPUTS = [105, 106, 107, 203, 204, 205, 306, 307, 308, 402, 504]
OUTPUTS = [106, 900, 108, 204, 205, 206, 901, 308, 309, 403, 505]
LAST = [1, 5, 6, 9, 10]
MASK = [1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1]
REQUIRED = [*range(9), 10, 14]


@pytest.mark.parametrize("input_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("output_dtype", INDEX_DTYPES)
def test_the_worked_example(twin: Ops, input_dtype: torch.dtype, output_dtype: torch.dtype):
    inputs, outputs = twin.ints(INPUTS, input_dtype), twin.ints(OUTPUTS, output_dtype)
    last, mask, squeezed = twin.verify_speculative_tokens(inputs[None], outputs, 3, 2, 2)
    assert (last.dtype, mask.dtype, squeezed.dtype) == (torch.int64, torch.bool, input_dtype)
    assert squeezed.tolist() == INPUTS
    assert last.tolist() == LAST
    assert mask.tolist() == [bool(bit) for bit in MASK]

    # Row 2's second draft equals the target's token, after a mismatch: it does not count.
    assert INPUTS[8] == OUTPUTS[7]

    sampled, last_seq = twin.filled(7, dtype=output_dtype), twin.filled(6, dtype=input_dtype)
    accepted, counts = twin.filled(7, 4, dtype=input_dtype), twin.filled(8, dtype=output_dtype)
    required = twin.ints(REQUIRED, output_dtype)
    twin.prepare_next_forward_pass(
        3, outputs, required, last, mask, squeezed, sampled, last_seq, accepted, counts, 2
    )
    assert sampled.tolist() == [900, 206, 901, 403, 505, CANARY, CANARY]
    assert last_seq.tolist() == [1, 5, 6, 10, 14, CANARY]
    assert accepted[:3, :2].tolist() == [[106, -1], [204, 205], [-1, -1]]
    assert (accepted[3:] == CANARY).all() and (accepted[:, 2:] == CANARY).all()
    assert counts.tolist() == [1, 2, 0, *[CANARY] * 5]


def test_only_consecutive_matches_count(twin: Ops):
    """Every pattern of four matches and mismatches."""
    drafts = 4
    inputs: list[int] = []
    outputs: list[int] = []
    expected = []
    for pattern in range(2**drafts):
        bits = [pattern >> j & 1 for j in range(drafts)]
        inputs += [1, 10, 11, 12, 13]
        outputs += [10 + j if bit else 90 + j for j, bit in enumerate(bits)] + [14]
        leading = [*bits, 0].index(0)
        expected.append(pattern * (drafts + 1) + leading)
    last, mask, _ = twin.verify_speculative_tokens(
        twin.ints(inputs), twin.ints(outputs), 2**drafts, 0, drafts
    )
    assert last.tolist() == expected
    first = torch.arange(2**drafts) * (drafts + 1)
    assert mask.cpu().view(-1, drafts + 1).sum(1).tolist() == (
        (torch.tensor(expected) - first + 1).tolist()
    )


@SETTINGS
@given(data=st.data())
def test_matches_a_plain_loop(twin: Ops, data: st.DataObject):
    drafts = data.draw(st.integers(0, 5))
    decode = data.draw(st.sampled_from([0, 1, 2, 7, 140]))
    prefill = data.draw(st.sampled_from([0, 1, 3, 130]))
    padding = data.draw(st.integers(0, 5))
    dtypes = [data.draw(st.sampled_from(INDEX_DTYPES)) for _ in range(8)]
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    required = decode * (drafts + 1) + prefill
    rows = decode + prefill
    # Few tokens, so that many match.
    inputs = torch.randint(2, (required,), generator=draw).tolist()
    outputs = torch.randint(2, (required,), generator=draw).tolist()
    inputs += [data.draw(st.sampled_from([HUGE, LOWEST, 0, 1])) for _ in range(padding)]
    outputs += [HUGE] * data.draw(st.integers(0, padding))
    indices = (torch.randperm(required + 9, generator=draw)[:required]).tolist()
    as_scalar = [data.draw(st.sampled_from([None, *INDEX_DTYPES])) for _ in range(2)]
    live = [
        count if dtype is None else torch.tensor(count, dtype=dtype, device=twin.device)
        for count, dtype in zip((decode, prefill), as_scalar, strict=True)
    ]

    inputs_n, outputs_n = twin.ints(inputs, dtypes[0]), twin.ints(outputs, dtypes[1])
    last, mask, _ = twin.verify_speculative_tokens(inputs_n, outputs_n, *live, drafts)
    expected_last, expected_mask = verify_loop(inputs, outputs, decode, prefill, drafts)
    assert mask.tolist() == expected_mask
    if as_scalar == [None, None]:
        assert last.tolist() == expected_last
    else:
        assert last.tolist() == expected_last + [-1] * (len(inputs) - rows)

    room = data.draw(st.integers(0, 3))
    size = last.numel() + room
    sampled, last_seq = twin.filled(size, dtype=dtypes[2]), twin.filled(size, dtype=dtypes[3])
    wide = twin.filled(size, drafts + 3, dtype=dtypes[4])
    counts = twin.filled(size, dtype=dtypes[5])
    twin.prepare_next_forward_pass(
        live[0],
        outputs_n,
        twin.ints([*indices, *[HUGE] * padding], dtypes[6]),
        last.to(dtypes[7]),
        mask,
        inputs_n,
        sampled,
        last_seq,
        wide[:, 1 : drafts + 1],
        counts,
        drafts,
    )
    rest = [CANARY] * (size - rows)
    assert sampled.tolist() == [outputs[at] for at in expected_last] + rest
    assert last_seq.tolist() == [indices[at] for at in expected_last] + rest
    expected_wide = [[CANARY] * (drafts + 3) for _ in range(size)]
    expected_counts = [CANARY] * size
    for row in range(decode):
        first = row * (drafts + 1)
        count = expected_last[row] - first
        kept = inputs[first + 1 : first + 1 + count]
        expected_wide[row][1 : drafts + 1] = kept + [-1] * (drafts - count)
        expected_counts[row] = count
    assert wide.tolist() == expected_wide
    assert counts.tolist() == expected_counts


def test_without_drafts_tokens_are_gathered_and_counts_zeroed(twin: Ops):
    inputs, outputs = twin.ints([3, 4, 5]), twin.ints([6, 7, 8])
    last, mask, _ = twin.verify_speculative_tokens(inputs, outputs, 2, 1, 0)
    assert (last.tolist(), mask.tolist()) == ([0, 1, 2], [True] * 3)
    sampled, last_seq, counts = twin.filled(3), twin.filled(3), twin.filled(3)
    twin.prepare_next_forward_pass(
        2,
        outputs,
        twin.ints([0, 1, 9]),
        last,
        mask,
        inputs,
        sampled,
        last_seq,
        twin.filled(3, 0),
        counts,
        0,
    )
    assert sampled.tolist() == [6, 7, 8]
    assert last_seq.tolist() == [0, 1, 9]
    assert counts.tolist() == [0, 0, CANARY]


def test_the_mask_is_taken_as_given(twin: Ops):
    """The count is of true bits, even for an accepted draft that is -1."""
    accepted, counts = twin.filled(1, 3), twin.filled(1)
    twin.prepare_next_forward_pass(
        1,
        twin.ints([5, 6, 7, 8]),
        twin.ints([0, 1, 2, 3]),
        twin.ints([2]),
        torch.tensor([False, True, False, True], device=twin.device),
        twin.ints([1, -1, 3, 4]),
        twin.filled(1),
        twin.filled(1),
        accepted,
        counts,
        3,
    )
    assert (accepted.tolist(), counts.tolist()) == ([[-1, -1, 4]], [2])


@pytest.mark.parametrize("padding", [0, 3])
def test_zero_rows(twin: Ops, padding: int):
    tokens = twin.ints([HUGE] * padding)
    last, mask, squeezed = twin.verify_speculative_tokens(tokens, tokens, 0, 0, 3)
    assert (last.tolist(), mask.tolist(), squeezed.tolist()) == (
        [],
        [False] * padding,
        tokens.tolist(),
    )
    buffers = [twin.filled(2), twin.filled(2), twin.filled(2, 3), twin.filled(2)]
    twin.prepare_next_forward_pass(0, tokens, tokens, last, mask, tokens, *buffers, 3)
    assert all((buffer == CANARY).all() for buffer in buffers)


def skip(name: str) -> tuple[Callable[..., Any], str]:
    """What skips wrong rows: the reference, the kernel where the host does not check before it."""
    if name == "reference":
        return ops.prepare_next_forward_pass_reference, "cpu"
    if not NATIVE and not INTERPRETED:
        pytest.skip("kernels run natively on a GPU or with TRITON_INTERPRET=1")
    return (ops.prepare_next_forward_pass, "cuda") if NATIVE else (ops._launch_prepare, "cpu")


@pytest.mark.parametrize("name", ["reference", "kernel"])
@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_rows_outside_the_arrays_are_skipped_and_counted(name: str, dtype: torch.dtype):
    op, device = skip(name)
    twin = Ops(device, "")
    errors = twin.ints([10], dtype)
    outputs, mask = twin.ints([50, 51, 52, 53]), torch.ones(5, dtype=torch.bool, device=device)
    buffers = [twin.filled(6), twin.filled(6), twin.filled(6, 1), twin.filled(6)]
    live = torch.tensor(3, device=device)
    last = twin.ints([1, 4, 3, LOWEST, -1, 2])
    op(live, outputs, twin.ints(range(9)), last, mask, mask.long(), *buffers, 1, errors)
    # Row 1 is past the outputs, row 2 has four of its six inputs, row 4 is padded.
    assert errors.tolist() == [13]
    assert buffers[0].tolist() == [51, CANARY, CANARY, CANARY, CANARY, 52]
    assert buffers[1].tolist() == [1, CANARY, CANARY, CANARY, CANARY, 2]
    assert buffers[2].tolist() == [[1], *[[CANARY]] * 5]
    assert buffers[3].tolist() == [1, *[CANARY] * 5]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_counts_that_the_host_cannot_check_leave_rows_out(device: str):
    if device == "cuda" and not NATIVE:
        pytest.skip("needs a GPU")
    twin = Ops(device, "_reference" if device == "cpu" else "")
    inputs = twin.ints([1, 2, 3, 4, 5])
    whole = [1, 3, -1, -1, -1], [True] * 4 + [False]
    prompts = [0, 1, -1, -1, -1], [True, True, False, False, False]
    for live, expected in {
        (3, 1): whole,
        (HUGE, HUGE): whole,
        (2**62, 2**62): whole,
        (2, -(2**62)): whole,
        (-5, 2): prompts,
        (-(2**62), 2): prompts,
    }.items():
        counts = [torch.tensor(count, device=device) for count in live]
        last, mask, _ = twin.verify_speculative_tokens(inputs, inputs + 1, *counts, 1)
        assert (last.tolist(), mask.tolist()) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
def test_a_captured_graph_follows_the_live_counts():
    twin = Ops("cuda", "")
    drafts, size = 2, len(INPUTS) + 4
    inputs, outputs = twin.ints([HUGE] * size), twin.ints([HUGE] * size)
    required, counts = twin.ints([HUGE] * size), twin.ints([0, 0], torch.int32)
    buffers = [twin.filled(8), twin.filled(8), twin.filled(8, drafts), twin.filled(8)]
    errors = twin.ints([0])

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        last, mask, _ = ops.verify_speculative_tokens(inputs, outputs, counts[0], counts[1], drafts)
        ops.prepare_next_forward_pass(
            counts[0], outputs, required, last[:8], mask, inputs, *buffers, drafts, errors
        )
        return last, mask

    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        last, mask = step()
    inputs[: len(INPUTS)] = twin.ints(INPUTS)
    outputs[: len(INPUTS)] = twin.ints(OUTPUTS)
    required[: len(INPUTS)] = twin.ints(REQUIRED)
    for decode, prefill in ((3, 2), (1, 0), (0, 4), (0, 0), (2, 1), (3, 2)):
        for buffer in buffers:
            buffer.fill_(CANARY)
        counts.copy_(twin.ints([decode, prefill]))
        graph.replay()
        rows = decode + prefill
        live = verify_loop(INPUTS, OUTPUTS, decode, prefill, drafts)
        assert last.tolist() == live[0] + [-1] * (size - rows)
        assert mask.tolist() == live[1] + [False] * 4
        assert buffers[0].tolist() == [OUTPUTS[at] for at in live[0]] + [CANARY] * (8 - rows)
        assert buffers[1].tolist() == [REQUIRED[at] for at in live[0]] + [CANARY] * (8 - rows)
        assert (buffers[2][decode:] == CANARY).all()
        accepted = [live[0][row] - row * (drafts + 1) for row in range(decode)]
        assert buffers[3].tolist() == accepted + [CANARY] * (8 - decode)
    assert errors.tolist() == [0]


VERIFY = {
    "input_tokens": torch.zeros(8, dtype=torch.int64),
    "output_tokens": torch.zeros(7, dtype=torch.int64),
    "num_decode_requests": 2,
    "num_prefill_requests": 1,
    "num_speculative_tokens": 2,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_tokens": torch.zeros(8)}, "input_tokens must be int32 or int64, not torch.float"),
        ({"output_tokens": torch.zeros(7).short()}, "output_tokens must be int32 or int64"),
        ({"input_tokens": torch.zeros(2, 4).long()}, r"\[n\] or \[1, n\], not \(2, 4\)"),
        ({"input_tokens": torch.zeros(16).long()[::2]}, r"dense \[n\] or \[1, n\].* \(2,\)"),
        ({"output_tokens": torch.zeros(1, 7).long()}, r"output_tokens must be a dense vector"),
        ({"output_tokens": torch.zeros(7).long().to("meta")}, "output_tokens is on meta, other"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1 must be 0 or more"),
        ({"num_decode_requests": -1}, r"num_decode_requests=-1 is outside 0\.\.8"),
        ({"num_prefill_requests": 9}, r"num_prefill_requests=9 is outside 0\.\.8"),
        ({"num_prefill_requests": torch.tensor(-3)}, r"num_prefill_requests=-3 is outside 0\.\.8"),
        ({"num_prefill_requests": 2}, "require 8 tokens: there are 8 inputs and 7 outputs"),
        ({"num_decode_requests": torch.tensor(3)}, "require 10 tokens: there are 8 inputs"),
        ({"num_decode_requests": torch.tensor([2, 2])}, r"an int or a scalar, not \(2,\)"),
        ({"num_decode_requests": torch.tensor(2.0)}, "num_decode_requests must be int32 or int64"),
        ({"num_decode_requests": torch.tensor(2).to("meta")}, "num_decode_requests is on meta"),
    ],
)
def test_what_cannot_be_verified_is_named(change: dict[str, Any], message: str):
    ops.verify_speculative_tokens(**VERIFY)
    with pytest.raises(ValueError, match=message):
        ops.verify_speculative_tokens(**VERIFY | change)


def _prepare() -> dict[str, Any]:
    return {
        "num_decode_requests": 2,
        "output_tokens": torch.zeros(7, dtype=torch.int64),
        "required_logit_indices": torch.arange(8),
        "last_one_indices": torch.tensor([0, 5, 6]),
        "accepted_tokens_mask": torch.ones(8, dtype=torch.bool),
        "input_tokens": torch.zeros(8, dtype=torch.int64),
        "sampled_tokens_buf": torch.full((3,), CANARY),
        "last_accepted_seq_buf": torch.full((3,), CANARY),
        "accepted_tokens_per_request": torch.full((2, 2), CANARY),
        "accepted_token_counts": torch.full((2,), CANARY),
        "num_speculative_tokens": 2,
        "error_count": torch.zeros(1, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_decode_requests": 4}, r"num_decode_requests=4 is outside 0\.\.3"),
        ({"num_decode_requests": torch.tensor(4)}, r"num_decode_requests=4 is outside 0\.\.3"),
        ({"num_decode_requests": torch.tensor(2)}, "accepted_token_counts must be .* 3 or more"),
        ({"num_decode_requests": 3}, "require 9 tokens: there are 8 inputs and 8 entries"),
        ({"num_speculative_tokens": -2}, "num_speculative_tokens=-2 must be 0 or more"),
        ({"last_one_indices": torch.tensor([0, 5, 7])}, "row 2 with last_one_indices=7 .* 7 outp"),
        ({"last_one_indices": torch.tensor([0, -2, 6])}, "row 1 with last_one_indices=-2 points"),
        ({"required_logit_indices": torch.arange(6)}, "outside the 7 outputs, 6 required"),
        ({"accepted_tokens_mask": torch.ones(8)}, "accepted_tokens_mask must be bool"),
        ({"accepted_tokens_mask": torch.ones(8).bool().to("meta")}, "accepted_tokens_mask is on"),
        ({"accepted_tokens_mask": torch.ones(5).bool()}, "8 inputs and 5 entries in the mask"),
        ({"sampled_tokens_buf": torch.zeros(2).long()}, r"of 3 or more, not \(2,\)"),
        ({"last_accepted_seq_buf": torch.zeros(6).long()[::2]}, r"dense vector .* strides \(2,\)"),
        ({"last_accepted_seq_buf": torch.zeros(3)}, "last_accepted_seq_buf must be int32 or int64"),
        ({"accepted_tokens_per_request": torch.zeros(1, 2).long()}, "2 x 2 or more with dense"),
        ({"accepted_tokens_per_request": torch.zeros(2, 1).long()}, "2 x 2 or more with dense"),
        ({"accepted_tokens_per_request": torch.zeros(2, 2).long().T}, r"with strides \(1, 2\)"),
        ({"accepted_token_counts": torch.zeros(1).long()}, "accepted_token_counts must be a dense"),
        ({"error_count": torch.zeros(2).long()}, r"error_count must be a scalar, not \(2,\)"),
        ({"error_count": torch.zeros(1)}, "error_count must be int32 or int64"),
    ],
)
def test_what_cannot_be_prepared_is_named(change: dict[str, Any], message: str):
    ops.prepare_next_forward_pass(**_prepare())
    arguments = _prepare() | change
    before = [
        value.clone() if isinstance(value, torch.Tensor) else 0 for value in arguments.values()
    ]
    with pytest.raises(ValueError, match=message):
        ops.prepare_next_forward_pass(**arguments)
    for old, new in zip(before, arguments.values(), strict=True):
        if isinstance(new, torch.Tensor) and new.device.type == "cpu":
            assert torch.equal(old, new), "nothing is written before an error"
