"""Sampling: both twins against a slow sampler in plain Python, and against the exact distribution.

The slow sampler sorts its candidates and adds their masses as Python integers. On the CPU all three
agree to the token. A GPU's exp and log differ from numpy's by some ulps, so there a token counts as
right too if its perturbed value is within `TOLERANCE` of the best, or if it is the token of a top-p
or min-p that differs by `TOLERANCE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import LONG, extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.philox import gumbel, philox_uint32
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.cutoff import find_cutoffs
from graphengine.kernels.sample.sampling import (
    MAX_VOCABULARY,
    check_tiles,
    sample,
    sample_reference,
    sample_tiles,
    sample_tiles_reference,
    token_of_tiles_reference,
)
from graphengine.kernels.sample.tiles import best_of_tile

# Triton's interpreter scales huge logits with numpy, which warns of what is clamped next.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

NATIVE = torch.cuda.is_available() and not INTERPRETED
of_the_reference = pytest.mark.skipif(
    INTERPRETED, reason="the reference is tested in an ordinary process"
)
INF, NAN = float("inf"), float("nan")
HUGE, LOWEST = 2**31 - 1, -(2**31)
TOLERANCE = 1e-5
# From here on the sum of a logit and its noise counts with all of its bits.
COARSE = 2048.0
STOP_IDS = 3

Sampler = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Params:
    """One slot's sampling parameters."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = (-1,) * STOP_IDS
    min_len: int = 0


def tensors(params: Sequence[Params], device: str = "cpu") -> SamplingTensors:
    """The parameters of slots 0 .. len(params) - 1."""
    dtypes = {name: tensor.dtype for name, tensor in SamplingTensors.neutral(1)._asdict().items()}
    columns = {name: [asdict(slot)[name] for slot in params] for name in dtypes}
    return SamplingTensors(
        **{name: torch.tensor(columns[name], dtype=dtypes[name], device=device) for name in dtypes}
    )


def ints(values: Sequence[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def right_tokens(
    logits: Sequence[float], position: int, params: Params, *, tolerance: float = 0.0
) -> set[int]:
    """The slow sampler: the tokens that a row whose query sits at `position` may yield.

    Where float32 is coarse, its sums are exact.
    """
    variants = [params]
    if params.top_n_sigma:
        # Fixed point against the doubles of the slow sampler, whose sums round.
        factors = (1 - 1e-9, 1 + 1e-9)
        variants = [replace(params, top_n_sigma=params.top_n_sigma * each) for each in factors]
    if tolerance:
        factors = (1 - tolerance, 1 + tolerance)
        first = variants[:]
        for name in ("top_p", "min_p"):
            values = [getattr(params, name) * factor for factor in factors]
            variants += [replace(each, **{name: value}) for each in first for value in values]
    return set().union(*(_right_tokens(logits, position, each, tolerance) for each in variants))


def _right_tokens(
    logits: Sequence[float], position: int, params: Params, tolerance: float
) -> set[int]:
    row = [np.float32(value) for value in logits]
    if position + 1 < params.min_len:
        row = [np.float32(-INF) if i in params.stop_ids else x for i, x in enumerate(row)]
    if any(np.isnan(x) for x in row) or not any(np.isfinite(x) for x in row):
        return {-1}
    if params.temperature == 0:
        return {max(range(len(row)), key=lambda i: (row[i], -i))}

    order, scaled = _kept(row, params)
    noise = {i: gumbel(philox_uint32(params.seed, position + 1, [i]))[0] for i in order}
    value = {i: scaled[i] + noise[i] for i in order}
    best = max(value.values())
    if not tolerance:
        tied = [i for i in order if value[i] == best]
        if COARSE <= abs(best) < np.finfo(np.float32).max:
            # To 22 bits of the noise; no two of a test are so close.
            return {max(tied, key=lambda i: Fraction(float(scaled[i])) + Fraction(float(noise[i])))}
        return {min(tied)}
    slack = tolerance * max(1.0, abs(float(best)))
    return {i for i in order if float(best) - float(value[i]) <= slack}


def _kept(row: Sequence[np.float32], params: Params) -> tuple[list[int], list[np.float32]]:
    """The ids that the filters keep, the best first, and all ids' scaled logits."""
    largest_float = np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        scaled = [x / np.float32(params.temperature) for x in row]
    scaled = [min(max(x, -largest_float), largest_float) for x in scaled]
    order = [i for i in range(len(row)) if row[i] > -INF]
    order.sort(key=lambda i: (-scaled[i], i))
    top = scaled[order[0]]
    if params.top_n_sigma > 0:
        row64 = [min(max(float(x), -float(largest_float)), float(largest_float)) for x in row]
        sigma = float(np.std([row64[i] / 2**64 for i in order])) * 2**64
        reach = params.top_n_sigma * sigma
        beside = [row64[i] for i in order if row64[order[0]] - row64[i] <= reach]
        with np.errstate(over="ignore"):
            least = np.float32(min(beside)) / np.float32(params.temperature)
        order = [i for i in order if scaled[i] >= min(least, top)]
    if params.top_k > 0:
        order = order[: params.top_k]
    top_p = Fraction(float(np.float32(params.top_p)))
    if top_p < 1:
        with np.errstate(over="ignore"):
            mass = [int(np.exp(scaled[i] - top) * np.float32(2**40)) for i in order]
        share = top_p * sum(mass)
        order = order[: 1 + next(n for n, sum_n in enumerate(accumulate(mass)) if sum_n >= share)]
    if params.min_p > 0:
        share = np.log(np.float32(min(params.min_p, 1.0)))
        floor = top + share
        if COARSE <= abs(floor) < largest_float:
            floor = Fraction(float(top)) + Fraction(float(share))
        order = [i for i in order if scaled[i] >= floor]
    return order, scaled


@dataclass(frozen=True)
class Twin:
    sample: Sampler
    device: str

    @property
    def tolerance(self) -> float:
        return TOLERANCE if self.device == "cuda" else 0.0

    def tokens(
        self,
        logits: torch.Tensor | Sequence[Sequence[float]],
        params: Sequence[Params],
        positions: Sequence[int],
        slots: Sequence[int] | None = None,
        poison: int = -7,
    ) -> list[int]:
        """The tokens of the rows; `slots` names each row's parameters, by default its own."""
        logits = torch.as_tensor(logits, dtype=torch.float32).to(self.device)
        slot = ints(list(range(len(params))) if slots is None else slots, self.device)
        out = torch.full_like(slot, poison)
        position = ints(positions, self.device)
        token = self.sample(logits, slot, position, tensors(params, self.device), out=out)
        assert token is out
        return token.tolist()

    def check(
        self, logits: Sequence[Sequence[float]], params: Sequence[Params], positions: Sequence[int]
    ) -> None:
        tokens = self.tokens(logits, params, positions)
        for token, row, slot, position in zip(tokens, logits, params, positions, strict=True):
            right = right_tokens(row, position, slot, tolerance=self.tolerance)
            assert token in right, (token, right, slot, position)


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin(sample_reference, "cpu")
    return Twin(sample, request.getfixturevalue("device"))


# Few distinct values, so that ties are everywhere, and signed zeros.
TIED = st.sampled_from([0.0, -0.0, 1.0, 1.0078125, 2.0, 2.5, -3.0, -INF])
# What overflows or vanishes when it is scaled, and what is no number at all.
EXTREME = st.sampled_from([3e38, 3.1e38, 3e38, -3e38, 1e-40, 0.0, 88.0, -INF])
BROKEN = st.sampled_from([INF, NAN, 1.0, -INF])
ORDINARY = st.floats(-12, 12, width=32)
PARAMS = st.builds(
    Params,
    temperature=st.sampled_from([0.0, 1e-3, 0.25, 0.7, 1.0, 3.0, 1e4]),
    top_k=st.sampled_from([0, 1, 2, 3, 7, 10**6]),
    top_p=st.sampled_from([0.0, 1e-9, 0.25, 0.5, 0.9, 0.99, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-3, 0.3, 1.0]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 1e-3, 0.5, 1.0, 2.0, 1e30]),
    seed=st.integers(-(2**63), 2**63 - 1),
    stop_ids=st.tuples(*[st.sampled_from([-1, 0, 1, 4, HUGE])] * STOP_IDS),
    min_len=st.integers(0, 4),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[Params], list[int]]:
    rows = draw(st.integers(1, 3))
    vocabulary = draw(st.sampled_from([1, 2, 5, 16, 33]))
    # A row is of one kind: a single NaN in each would leave nothing to sample.
    kinds = st.sampled_from([TIED, TIED, ORDINARY, TIED | ORDINARY, EXTREME, BROKEN])
    logits = [
        draw(st.lists(draw(kinds), min_size=vocabulary, max_size=vocabulary)) for _ in range(rows)
    ]
    params = draw(st.lists(PARAMS, min_size=rows, max_size=rows))
    positions = draw(st.lists(st.sampled_from([0, 1, 2, 3, 2**31 - 2]), min_size=rows))
    return logits, params, [*positions, *[5] * rows][:rows]


@of_the_reference
@given(batch=batches())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_reference_agrees_with_the_slow_sampler(batch):
    Twin(sample_reference, "cpu").check(*batch)


@given(batch=batches())
@settings(max_examples=extent(16, 40), deadline=None, derandomize=True)
def test_the_kernel_agrees_with_the_slow_sampler(device: str, batch):
    Twin(sample, device).check(*batch)


def vocabularies(device: str) -> list[int]:
    """One tile, more than one, more than a pass of the cutoff kernel takes, and enough of them for
    it to gather the largest keys first; full sizes on a GPU."""
    small = [1000, 1025, 5000, 12_289]
    return small if device == "cpu" else [*small, 32_000, 151_936, 2**18]


FILTERS = [
    Params(temperature=0.0),
    Params(temperature=0.8),
    Params(top_k=50),
    Params(top_p=0.9, temperature=1.5),
    Params(min_p=0.02),
    Params(top_n_sigma=1.0, temperature=3.0),
    Params(top_n_sigma=1.5, top_p=0.9, min_p=0.01),
    Params(top_k=40, top_p=0.8, min_p=0.01, temperature=0.7),
]


@pytest.mark.parametrize("ties", [False, True], ids=["float32", "bfloat16 values"])
def test_large_vocabularies_agree_with_the_reference(device: str, ties: bool):
    generator = torch.Generator().manual_seed(3)
    for vocabulary in vocabularies(device):
        logits = 4 * torch.randn(len(FILTERS), vocabulary, generator=generator)
        if ties:
            logits = logits.bfloat16().float()
        params = [replace(each, seed=vocabulary - 5000 + i) for i, each in enumerate(FILTERS)]
        positions = list(range(7, 7 + len(params)))
        tokens = Twin(sample, device).tokens(logits, params, positions)
        expected = Twin(sample_reference, "cpu").tokens(logits, params, positions)
        for row, (token, slot) in enumerate(zip(tokens, params, strict=True)):
            if token != expected[row]:
                assert device == "cuda", "in the interpreter both use numpy's exp and log"
                right = right_tokens(
                    logits[row].tolist(), positions[row], slot, tolerance=TOLERANCE
                )
                assert token in right, (vocabulary, slot)


RESTS = ("far below", "close", "tied", "absent")


@pytest.mark.parametrize("rest", RESTS)
def test_filters_of_long_rows(device: str, rest: str):
    """Top-k and top-p find the same set whether the keys that are gathered first hold it or not."""
    vocabulary, generator = 12_289, torch.Generator().manual_seed(11)
    row = torch.randn(vocabulary, generator=generator)
    if rest == "far below":
        row[torch.randperm(vocabulary, generator=generator)[:40]] += 12
    elif rest == "tied":
        row = (2 * row).round()
    elif rest == "absent":
        row[torch.randperm(vocabulary, generator=generator)[30:]] = -INF
    cuts: list[dict[str, Any]] = [
        *({"top_k": k} for k in (1, 29, 31, 1024, 2048, 2049, 9000, vocabulary - 1)),
        *({"top_p": p} for p in (0.0, 0.1, 0.9, 0.999, 0.9999999)),
        {"top_k": 2500, "top_p": 0.9},
        {"top_n_sigma": 1.0, "top_k": 9000, "top_p": 0.9},
        {"top_n_sigma": 2.5, "top_p": 0.97},
        {"top_n_sigma": 0.5, "top_k": 60},
        {"top_k": 60, "top_p": 0.97, "stop_ids": (int(row.argmax()), 5, 6), "min_len": HUGE},
        {"top_p": 0.6, "stop_ids": (int(row.argmax()), 5, 6), "min_len": HUGE},
    ]
    # Some rows are hot, so that the end of what is kept is drawn as well.
    params = [Params(seed=i, temperature=(1, 9)[i % 2], **cut) for i, cut in enumerate(cuts)]
    # The interpreter takes half a second for each: every cut meets one kind of the rest, and every
    # kind both temperatures.
    own = [each for i, each in enumerate(params) if (i + i // 4) % 4 == RESTS.index(rest)]
    params = extent(own, params)
    logits, positions = row.expand(len(params), -1), [*range(len(params))]
    tokens = Twin(sample, device).tokens(logits, params, positions)
    expected = Twin(sample_reference, "cpu").tokens(logits, params, positions)
    for token, same, position, slot in zip(tokens, expected, positions, params, strict=True):
        if token != same:
            assert device == "cuda", (token, same, slot)
            assert token in right_tokens(row.tolist(), position, slot, tolerance=TOLERANCE), slot


SIGMA_CUTS = [
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 1.0, "top_k": 9000},
    {"top_n_sigma": 1.0, "top_k": 9001, "top_p": 0.6},
    {"top_n_sigma": 1.0, "top_p": 0.6},
    {"top_n_sigma": 3.0, "top_p": 0.999},
    {"top_n_sigma": 2.0, "top_k": 20, "top_p": 0.9, "temperature": 3.0},
    {"top_n_sigma": 1.5, "min_p": 0.5, "temperature": 5.0},
]


@pytest.mark.parametrize("rest", ["close", "tied"])
def test_what_is_kept_within_top_n_sigma(device: str, rest: str):
    """All of the set, where one draw would show a single token of it."""
    vocabulary, generator = 12_289, torch.Generator().manual_seed(21)
    row = torch.randn(vocabulary, generator=generator)
    row = (2 * row).round() if rest == "tied" else row
    row[::7] = -INF
    cuts = [Params(**cut) for cut in SIGMA_CUTS]
    logits, slots = (
        row.expand(len(cuts), -1).contiguous().to(device),
        ints(range(len(cuts)), device),
    )
    key, last = find_cutoffs(logits, slots, slots, tensors(cuts, device), ahead=1, pdl=False)
    for params, cut_key, cut_id in zip(cuts, key.tolist(), last.tolist(), strict=True):
        order, scaled = _kept(row.numpy(), params)
        bits = (np.array(scaled, np.float32) + np.float32(0)).view(np.int32)
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        kept = (keys > cut_key) | ((keys == cut_key) & (np.arange(vocabulary) <= cut_id))
        kept &= row.numpy() > -INF
        found, wanted = {*np.flatnonzero(kept).tolist()}, {*order}
        if device == "cpu":
            assert found == wanted, params
        # A GPU's exp differs by some ulps.
        assert len(found ^ wanted) <= 2, params


@pytest.mark.parametrize("by", ["top_k", "top_p"])
def test_cuts_at_the_edges_of_the_radix_select(twin: Twin, by: str):
    """Every cut through ties of values whose keys end, in base 4, in 0, 1 or 2 and then in 3s."""
    row = [-4.0, -2.0, -6.0, -3.0, -2.0, -6.0, -4.0, -3.0, -6.0, -4.0, -3.0, -2.0]
    # Hot enough that all that is kept is drawn about as often; a power of two keeps the digits.
    hot = Params(temperature=2.0**12)
    cuts = range(1, len(row) + 1)
    params = [
        replace(hot, top_k=cut) if by == "top_k" else replace(hot, top_p=(cut - 0.5) / len(row))
        for cut in cuts
    ]
    for position in range(extent(1, 3)):
        twin.check([row] * len(row), params, [position] * len(row))


def test_a_flat_row_is_cut_by_id(twin: Twin):
    """All candidates tie, so the filters keep ids 0 .. n - 1 of the 5,000, over several tiles."""
    params = [
        Params(top_k=3, min_p=1.0),
        Params(top_k=4500),
        Params(top_p=0.25),
        Params(top_k=8, top_p=0.5),
    ]
    kept = [3, 4500, 1250, 4]
    logits = torch.full((len(params), 5000), 0.125)
    for position in range(extent(1, 4)):
        positions = [position] * len(params)
        tokens = twin.tokens(logits, params, positions)
        for token, size in zip(tokens, kept, strict=True):
            noise = gumbel(philox_uint32(0, position + 1, np.arange(size)))
            assert noise[token] >= noise.max() - 2 * twin.tolerance


def test_top_p_0_keeps_the_best_alone(twin: Twin):
    """Greedy would keep it too, also with equal logits; and beside other filters."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(4, 5000, generator=generator)
    rows[1, [7, 3000, 4999]] = 9.0
    hot = Params(temperature=50.0, top_p=0.0)
    params = [hot, hot, replace(hot, top_k=30), replace(hot, min_p=0.01, top_n_sigma=2.0)]
    best = rows.argmax(dim=1).tolist()
    best[1] = 7
    for position in range(extent(2, 6)):
        assert twin.tokens(rows, params, [position] * 4) == best


def test_the_first_of_equal_logits_is_greedy(twin: Twin):
    row = torch.zeros(3000)
    row[[1500, 1023, 1024, 2999]] = 5.0
    signed_zeros = torch.full((3000,), -1.0)
    signed_zeros[700], signed_zeros[1800] = -0.0, 0.0
    greedy = Params(temperature=0.0)
    assert twin.tokens(torch.stack([row, signed_zeros]), [greedy] * 2, [0, 0]) == [1023, 700]


@pytest.mark.parametrize("params", FILTERS)
def test_rows_without_valid_logits_yield_no_token(twin: Twin, params: Params):
    valid = [0.0] * 1100
    with_nan = [*valid[:1090], NAN, *valid[1091:]]
    rows = [
        (with_nan, -1),
        ([NAN] * 1100, -1),
        ([-INF] * 1100, -1),
        ([INF] * 1100, -1),
        ([INF, -INF] * 550, -1),
        ([*[-INF] * 1099, -2.0], 1099),
        ([*valid[:1090], INF, *valid[1091:]], 1090),
    ]
    tokens = twin.tokens([row for row, _ in rows], [params] * len(rows), [0] * len(rows))
    assert tokens == [token for _, token in rows]


def test_logits_that_overflow_when_scaled_tie_at_the_largest_float(twin: Twin):
    rows = [[0.0, 3e38, -3e38, 3.1e38, -INF], [-3e38, -INF, -3.1e38, -3e38, -3e38]]
    params = [
        Params(temperature=1e-3, top_k=2),
        Params(temperature=1e-3, top_k=9),
        Params(temperature=1e-3, top_p=0.4),
        Params(temperature=1e-3, top_p=0.75),
        Params(temperature=1e-3, min_p=0.5),
    ]
    for row, token in zip(rows, (1, 0), strict=True):
        twin.check([row] * len(params), params, [4] * len(params))
        assert twin.tokens([row] * len(params), params, [4] * len(params)) == [token] * len(params)


def test_stop_ids_wait_for_min_len(twin: Twin):
    """While the sequence before the token, p + 1 tokens, is below min_len, no stop id is drawn."""
    logits = [0.0, 9.0, 8.0, 7.0]
    greedy = Params(temperature=0.0, stop_ids=(1, -1, 2), min_len=10)
    params = [greedy, greedy, replace(greedy, stop_ids=(0, 1, 2)), greedy]
    assert twin.tokens([logits] * 4, params, [8, 9, 8, 2**31 - 2]) == [3, 1, 3, 1]
    # The masked ids are no candidates of any filter.
    drawn = replace(greedy, temperature=1.0, top_k=2, top_p=0.999)
    tokens = twin.tokens([logits] * 9, [drawn] * 9, list(range(9)))
    assert set(tokens) <= {0, 3}
    # A vocabulary of stop ids alone leaves nothing, and a masked NaN does no harm.
    rows = [[1.0, 2.0, -INF], [NAN, 2.0, 3.0]]
    params = [replace(greedy, stop_ids=(0, 1, 7)), replace(greedy, stop_ids=(0, 0, HUGE))]
    assert twin.tokens(rows, params, [0, 0]) == [-1, 2]


def test_a_token_depends_on_nothing_but_its_row(device: str):
    """Other rows, padded rows full of poison, the number of rows, and strides change no bit."""
    generator = torch.Generator().manual_seed(5)
    vocabulary = 1100
    logits = (3 * torch.randn(len(FILTERS), vocabulary, generator=generator)).bfloat16().float()
    params = [replace(each, seed=17 * i - 40) for i, each in enumerate(FILTERS)]
    twin = Twin(sample, device)
    alone = [
        twin.tokens(logits[i : i + 1], params, [100 + i], slots=[i])[0] for i in range(len(params))
    ]
    rows = 10
    order = torch.randperm(rows, generator=generator)[: len(params)].tolist()
    # A row stride of its own, as of a slice of a wider buffer.
    wide = torch.full((rows, vocabulary + 36), NAN)
    slots, positions = [-1, LOWEST] * (rows // 2), [HUGE, LOWEST] * (rows // 2)
    for slot, row in enumerate(order):
        wide[row, :vocabulary] = logits[slot]
        slots[row], positions[row] = slot, 100 + slot
    tokens = twin.tokens(wide.to(device)[:, :vocabulary], params, positions, slots, poison=-77)
    assert [tokens[row] for row in order] == alone
    assert all(token == -77 for row, token in enumerate(tokens) if row not in order)


# Tiles: what is left of a row for `verify_commit_publish`, and what lm_head computes of its own
# logits.


@triton.jit
def _fast_kernel(
    logits_ptr,
    slot_ptr,
    position_ptr,
    temperature_ptr,
    seed_ptr,
    stop_ids_ptr,
    min_len_ptr,
    best_ptr,
    health_ptr,
    lanes,
    vocabulary,
    stop_ids,
    L: tl.constexpr,
    B: tl.constexpr,
):
    """`best_of_tile` as lm_head uses it: L lanes and B ids a program, logits from registers."""
    lane = tl.program_id(0) * L + tl.arange(0, L)
    ids = tl.program_id(1) * B + tl.arange(0, B)
    slot = tl.load(slot_ptr + lane, mask=lane < lanes, other=-1)
    live = slot >= 0
    source = logits_ptr + lane[:, None] * vocabulary + ids[None, :]
    mask = (lane < lanes)[:, None] & (ids < vocabulary)[None, :]
    # Where there is nothing to load a product holds anything.
    logits = tl.load(source, mask=mask, other=float("nan"))
    position = tl.load(position_ptr + lane, mask=live, other=0) + 1
    best, health = best_of_tile(
        logits,
        ids[None, :],
        (ids < vocabulary)[None, :],
        slot[:, None],
        position[:, None],
        live[:, None],
        temperature_ptr,
        seed_ptr,
        stop_ids_ptr,
        min_len_ptr,
        stop_ids,
    )
    at = lane * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + at, best, mask=live)
    tl.store(health_ptr + at, health, mask=live)


UNTOUCHED = -77


def fast_tiles(
    logits: torch.Tensor,
    slot: torch.Tensor,
    position: torch.Tensor,
    params: SamplingTensors,
    *,
    tile: int,
    lanes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocabulary = logits.shape
    shape = (rows, triton.cdiv(vocabulary, tile))
    best = torch.full(shape, UNTOUCHED, dtype=torch.int64, device=logits.device)
    health = torch.full(shape, UNTOUCHED, dtype=torch.int32, device=logits.device)
    _fast_kernel[(triton.cdiv(rows, lanes), shape[1])](
        logits,
        slot,
        position,
        params.temperature,
        params.seed,
        params.stop_ids,
        params.min_len,
        best,
        health,
        rows,
        vocabulary,
        params.stop_ids.shape[1],
        L=lanes,
        B=tile,
    )
    return best, health


# Greedy and drawing lanes, some of which wait for min_len, all without filters.
UNFILTERED = [
    Params(temperature=0.0, seed=3),
    Params(temperature=0.7, seed=-(2**63)),
    Params(temperature=0.0, stop_ids=(1, 5, -1), min_len=HUGE),
    Params(temperature=1.0, seed=2**63 - 1, stop_ids=(HUGE, 0, 4), min_len=HUGE),
    Params(temperature=1e-3, seed=17, stop_ids=(2, 3, 6), min_len=3),
    Params(temperature=30.0, seed=17),
]


@given(data=st.data())
@settings(max_examples=extent(12, 40), deadline=None, derandomize=True)
def test_tiles_of_any_shape_agree_with_the_reference(device: str, data: st.DataObject):
    """2-D tiles of lanes that ask for different things; padded lanes are poisoned."""
    rows = data.draw(st.integers(1, 9))
    vocabulary = data.draw(st.sampled_from(extent([1, 7, 40], [1, 7, 40, 130])))
    tile, lanes = data.draw(st.sampled_from([16, 32, 64])), data.draw(st.sampled_from([1, 2, 8]))
    logits = torch.full((rows, vocabulary), NAN)
    slots, positions = [], []
    for row in range(rows):
        slot = data.draw(st.sampled_from([-1, LOWEST, *range(len(UNFILTERED))]))
        slots.append(slot)
        positions.append(data.draw(st.integers(0, 4)) if slot >= 0 else LOWEST)
        if slot >= 0:
            kind = data.draw(st.sampled_from([TIED, ORDINARY, EXTREME, BROKEN]))
            values = st.lists(kind, min_size=vocabulary, max_size=vocabulary)
            logits[row] = torch.tensor(data.draw(values))
    arguments = (logits, ints(slots), ints(positions))
    expected = sample_tiles_reference(*arguments, tensors(UNFILTERED), tile=tile)
    token = sample_reference(*arguments, tensors(UNFILTERED))
    live = ints(slots) >= 0
    assert token_of_tiles_reference(*expected)[live].tolist() == token[live].tolist()

    on_device = (tensor.to(device) for tensor in arguments)
    tiles = fast_tiles(*on_device, tensors(UNFILTERED, device), tile=tile, lanes=lanes)
    best, health = (tensor.cpu() for tensor in tiles)
    assert (best[~live] == UNTOUCHED).all()
    assert (health[~live] == UNTOUCHED).all()
    if device == "cpu":
        assert torch.equal(health[live], expected[1][live])
        assert torch.equal(best[live], expected[0][live])
    assert torch.equal(health[live] & 3, expected[1][live] & 3)
    # On a GPU the logarithm differs by some ulps; the next test compares its kernels to the bit.


# The interpreter's time is that of the programs: it gets none of many small ones.
SHAPES = [(64, 16), (1024, 4), (2048, 1)]
if LONG:
    SHAPES += [(32, 4), (32, 16), (64, 4), (1024, 1), (1024, 16), (2048, 4)]
if NATIVE:
    SHAPES += [(32, 1), (64, 1), (2048, 16)]


@pytest.mark.parametrize(("tile", "lanes"), SHAPES)
def test_the_tiling_changes_no_bit(device: str, tile: int, lanes: int):
    """The folded sampler's best of a row is that of `sample_tiles`, value and id.

    At a temperature of 1e-3 the values are so huge that tiles tie, and their health has the errors.
    """
    vocabulary = 1100
    generator = torch.Generator().manual_seed(2)
    rows = len(UNFILTERED) if device == "cpu" else 3 * len(UNFILTERED)
    logits = (3 * torch.randn(rows, vocabulary, generator=generator)).bfloat16().float().to(device)
    slot = ints([*range(len(UNFILTERED))] * (rows // len(UNFILTERED)), device)
    arguments = (logits, slot, ints(range(rows), device), tensors(UNFILTERED, device))
    best, health = sample_tiles(*arguments)
    assert best.shape == health.shape == (rows, 2)
    folded, folded_health = fast_tiles(*arguments, tile=tile, lanes=lanes)
    assert torch.equal(folded.amax(1) >> 32, best.amax(1) >> 32)
    assert torch.equal((folded_health & 3).amax(1), (health & 3).amax(1))
    token = sample(*arguments)
    assert torch.equal(token_of_tiles_reference(folded, folded_health), token)
    if tile == 1024:
        assert torch.equal(folded, best) and torch.equal(folded_health, health)


@given(batch=batches())
@settings(max_examples=extent(6, 20), deadline=None, derandomize=True)
def test_tiles_with_filters_agree_with_the_reference(device: str, batch):
    logits, params, positions = batch
    slot, position = ints(range(len(params)), device), ints(positions, device)
    arguments = (torch.tensor(logits, dtype=torch.float32, device=device), slot, position)
    best, health = sample_tiles(*arguments, tensors(params, device))
    assert check_tiles(best, health, len(params)) == 1
    tokens = token_of_tiles_reference(best, health).tolist()
    for token, row, each, where in zip(tokens, logits, params, positions, strict=True):
        assert token in right_tokens(row, where, each, tolerance=TOLERANCE * (device == "cuda"))
    expected = sample_tiles_reference(*arguments, tensors(params, device))
    assert torch.equal(health & 3, expected[1] & 3)
    if device == "cpu":
        assert torch.equal(best, expected[0]) and torch.equal(health, expected[1])
    # A draft's query is further from its token.
    earlier = (arguments[0], slot, position - 2, tensors(params, device))
    for further in (sample_tiles(*earlier, ahead=3), sample_tiles_reference(*earlier, ahead=3)):
        assert torch.equal(further[1] & 3, health & 3)
        if device == "cpu":
            assert torch.equal(further[0], best) and torch.equal(further[1], health)


# Distributions, through the reference with fixed seeds: each is one fixed number, not a gamble.

DRAWS = extent(1500, 4000)
LOGITS = np.array([2.0, 1.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.0, -2.0, 0.25, -INF, 0.0], np.float32)


@of_the_reference
@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (Params(temperature=1.0), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11]),
        (Params(temperature=0.5), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11]),
        (Params(temperature=2.5), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11]),
        (Params(top_k=3), [0, 1, 2]),
        (Params(top_k=6, temperature=1.5), [0, 1, 2, 3, 7, 9]),
        # Masses over e^2: 1, 3 x 0.368, 0.223, 0.174, ... of 2.93 in all.
        (Params(top_p=0.5), [0, 1, 2]),
        (Params(top_p=0.78), [0, 1, 2, 3, 7]),
        # Of the first five, 0.8 is reached by four.
        (Params(top_k=5, top_p=0.8), [0, 1, 2, 7]),
        (Params(min_p=0.2), [0, 1, 2, 3, 7]),
        (Params(top_p=0.9, min_p=0.3), [0, 1, 2, 7]),
        # Of the logits above -inf sigma is 1.049, at any temperature.
        (Params(top_n_sigma=1.0), [0, 1, 2, 7]),
        (Params(top_n_sigma=1.5, temperature=2.5), [0, 1, 2, 3, 7]),
        # Of the masses that 1.5 keeps, 2.33, half is reached by two; of all it takes three.
        (Params(top_n_sigma=1.5, top_p=0.5), [0, 1]),
        (Params(top_n_sigma=1.5, min_p=0.3), [0, 1, 2, 7]),
        (Params(top_n_sigma=1.0, top_k=20), [0, 1, 2, 7]),
    ],
)
def test_draws_follow_the_exact_distribution(params: Params, kept: list[int]):
    logits = torch.from_numpy(LOGITS).expand(DRAWS, -1)
    slot, position = torch.zeros(DRAWS, dtype=torch.int32), torch.arange(DRAWS, dtype=torch.int32)
    tokens = sample_reference(logits, slot, position, tensors([replace(params, seed=2027)]))
    counts = np.bincount(tokens.numpy(), minlength=LOGITS.size)
    assert counts.sum() == counts[kept].sum(), "nothing outside the kept set is ever drawn"

    weight = np.exp(LOGITS[kept].astype(float) / params.temperature)
    expected = DRAWS * weight / weight.sum()
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    freedom = len(kept) - 1
    # 3.1 standard deviations, by Wilson and Hilferty: one case in a thousand exceeds it.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.1 * np.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit, (chi_square, limit)


def test_huge_logits_are_drawn_as_their_differences_say():
    """Noise is not rounded away: rows that differ by a constant alone are drawn alike."""
    fine = np.array([3.0, 2.0, 2.0, 0.0, -5.0], np.float32)
    position = torch.arange(300, dtype=torch.int32)
    slot = torch.zeros_like(position)

    def draw(row: np.ndarray[Any, Any], temperature: float) -> list[int]:
        logits = torch.from_numpy(row.astype(np.float32)).expand(len(slot), -1)
        params = tensors([Params(temperature=temperature, seed=2027)])
        tokens: list[int] = sample_reference(logits, slot, position, params).tolist()
        return tokens

    tokens = draw(fine, 1.0)
    for shift in (-1e6, 1e7):
        assert draw(fine + np.float64(shift), 1.0) == tokens, shift
    # So they are where the huge numbers come from the temperature.
    assert draw(np.float32(2**-17) * fine + 1.0, 2.0**-17) == tokens


HUGE_ROWS = [
    pytest.param([5.0, 1e8, 1e8, -1e8], {1: 1, 2: 1}, {}, id="equal"),
    pytest.param([1e8 + 8, 1e8, 0.0], {0: 1, 1: np.exp(-8)}, {}, id="8 apart"),
    pytest.param([1e7, 1e7 + 1, 9.0], {0: 1, 1: np.e}, {}, id="1 apart"),
    pytest.param([-1e8, -1e8, -INF, -1e8, -2e8], {0: 1, 1: 1, 3: 1}, {}, id="all low"),
    pytest.param([-1e20, -1e20, -INF], {0: 1, 1: 1}, {}, id="lowest"),
    pytest.param([1e20] * 3, {0: 1, 1: 1, 2: 1}, {"temperature": 1e-6}, id="coldest"),
    pytest.param([1e8] * 4, {0: 1, 1: 1}, {"top_k": 2}, id="top-k"),
    pytest.param([1e8] * 4, {0: 1, 1: 1}, {"top_p": 0.5}, id="top-p"),
    # e^-8 is 3.4e-4. As a float the floor of e^-5 lies 8 below the largest.
    pytest.param([1e8, 1e8 - 8, 1e8], {0: 1, 2: 1}, {"min_p": float(np.exp(-5))}, id="min-p"),
    pytest.param([-1e8, -1e8 - 8, -1e8], {0: 1, 2: 1}, {"min_p": 0.5}, id="min-p, low"),
    pytest.param([1e8, 1e8 - 8], {0: 1, 1: np.exp(-8)}, {"min_p": 3e-4}, id="min-p keeps"),
]


@of_the_reference
@pytest.mark.parametrize(("row", "weights", "options"), HUGE_ROWS)
def test_frequencies_of_huge_logits(
    row: list[float], weights: dict[int, float], options: dict[str, float]
):
    position = torch.arange(600, dtype=torch.int32)
    slot, logits = torch.zeros_like(position), torch.tensor(row).expand(600, -1)
    params = tensors([Params(seed=2027, **options)])
    counts = np.bincount(sample_reference(logits, slot, position, params), minlength=len(row))
    for token, count in enumerate(counts):
        share = weights.get(token, 0.0) / sum(weights.values())
        # 4 standard deviations of the binomial, and 4 where hardly any are expected.
        bound = 4 * np.sqrt(600 * share * (1 - share)) + 4 * (0 < share < 0.01)
        assert abs(count - 600 * share) <= bound, (counts.tolist(), weights)


def test_the_floor_of_min_p_is_not_rounded_down(twin: Twin):
    """The others, 8 below the likeliest, have a share of e^-8 each; e^-5 is rounded to that."""
    above, below = torch.full((6, 2000), 1e8 - 8), torch.full((6, 2000), -1e8 - 8)
    for rows, largest in ((above, 1e8), (below, -1e8)):
        rows[:, 7] = largest
        out, kept = Params(min_p=float(np.exp(-5))), Params(min_p=3e-4)
        assert twin.tokens(rows, [out] * 6, [*range(6)]) == [7] * 6
        assert len({*twin.tokens(rows, [kept] * 6, [*range(6)])}) > 1


@of_the_reference
def test_huge_logits_that_tie_over_many_tiles(device: str):
    """Any tiling finds the token, the kernels that have and that have not the logits in memory."""
    vocabulary = 3000
    tied = torch.tensor([5, 1023, 1024, 2047, 2999])
    logits = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(4))
    logits[:3, tied] = 1e8
    logits[3:] = -1e8
    params = [Params(seed=3), Params(seed=4, top_k=3), Params(seed=5, temperature=1e-3)]
    slots, positions = [0, 1, 2, 0, 2, 0], [*range(40, 46)]
    rows = Twin(sample_reference, "cpu").tokens(logits, params, positions, slots)
    assert len({*rows}) > 3 and {*rows[:3]} <= {*tied.tolist()}

    unfiltered = [0, 2, 3, 4, 5]
    arguments = (logits, ints(slots), ints(positions))
    on_device = [tensor.to(device) for tensor in arguments]
    chosen = tensors(params, device)
    kernel = sample(*on_device, chosen).cpu()
    folded = token_of_tiles_reference(*fast_tiles(*on_device, chosen, tile=256, lanes=4)).cpu()
    assert torch.equal(folded[unfiltered], kernel[unfiltered])
    for tile in (64, 1024):
        tiles = sample_tiles_reference(*arguments, tensors(params), tile=tile)
        assert token_of_tiles_reference(*tiles).tolist() == rows
    # Noise of a GPU may be some ulps off, and no draw of these is so close.
    assert kernel.tolist() == rows


def test_seeds_and_positions_give_independent_draws():
    """Pairs of consecutive positions, and of neighbouring seeds, fill their table evenly."""
    logits = torch.zeros(DRAWS, 4)
    slot, position = torch.zeros(DRAWS, dtype=torch.int32), torch.arange(DRAWS, dtype=torch.int32)
    first, second = (
        sample_reference(logits, slot, position, tensors([Params(seed=seed)])).numpy()
        for seed in (-1, 0)
    )
    for left, right in ((first, second), (first[:-1], first[1:])):
        counts = np.bincount(4 * left + right, minlength=16)
        expected = left.size / 16
        assert ((counts - expected) ** 2 / expected).sum() < 37.7, "chi-square, 15 degrees, 1e-3"


def _wrong_arguments() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"logits_RV": torch.zeros(2, 8, dtype=torch.float16)}, "float16"
    yield {"logits_RV": torch.zeros(8, 2).t()}, "strides"
    yield {"logits_RV": torch.zeros(8)}, r"\(8,\)"
    yield {"logits_RV": torch.zeros(2, 0)}, "vocabulary of 0"
    yield {"logits_RV": torch.zeros(1).expand(2, MAX_VOCABULARY + 1)}, "strides"
    yield {"logits_RV": torch.zeros(MAX_VOCABULARY + 1).expand(2, -1)}, "4194305"
    yield {"slot_R": ints([0])}, r"slot must be a dense \[2\]"
    yield {"position_R": torch.zeros(2, dtype=torch.int64)}, "int64"
    yield {"out": torch.zeros(2, dtype=torch.int64)}, "out must be int32"
    for name, field in tensors([Params()] * 3)._asdict().items():
        wrong = tensors([Params()] * 3)._replace(**{name: field.to(torch.int16)})
        yield {"params": wrong}, f"{name} must be"
    short = tensors([Params()] * 3)._replace(seed=torch.zeros(2, dtype=torch.int64))
    yield {"params": short}, r"seed must be a dense torch.int64 \[3\]"


@pytest.mark.parametrize(("wrong", "message"), list(_wrong_arguments()))
def test_wrong_arguments_are_refused(wrong: dict[str, Any], message: str):
    arguments: dict[str, Any] = {
        "logits_RV": torch.zeros(2, 8),
        "slot_R": ints([0, 1]),
        "position_R": ints([0, 0]),
        "params": tensors([Params()] * 3),
    }
    with pytest.raises(ValueError, match=message):
        sample(**{**arguments, **wrong})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
def test_a_captured_graph_follows_the_parameters():
    """Nothing of a row is frozen at capture: slots, positions and parameters are read at replay."""
    twin, device = Twin(sample, "cuda"), "cuda"
    logits = 4 * torch.randn(3, 32_000, generator=torch.Generator().manual_seed(8))
    on_device = logits.to(device)
    slot, position = ints([-1, -1, -1], device), ints([0, 0, 0], device)
    static = tensors([Params()] * len(FILTERS), device)
    out = torch.full_like(slot, -7)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sample(on_device, slot, position, static, out=out)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        sample(on_device, slot, position, static, out=out)
    graph.replay()
    assert out.tolist() == [-7, -7, -7]
    for tensor, value in zip(static, tensors(FILTERS), strict=True):
        tensor.copy_(value)
    for slots in ([0, 1, 2], [5, 4, 3], [3, -1, 1]):
        slot.copy_(ints(slots))
        position.copy_(ints([10, 20, 30]))
        out.fill_(-7)
        graph.replay()
        expected = twin.tokens(logits, FILTERS, [10, 20, 30], slots)
        assert out.tolist() == expected
