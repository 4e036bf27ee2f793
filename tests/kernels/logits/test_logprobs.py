"""Log-probabilities, ranks and the most probable tokens, against PyTorch and plain loops."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.op import Op
from graphengine.kernels.logits import logprobs as module
from graphengine.kernels.logits import logprobs_mailbox as publish_module
from graphengine.kernels.logits.logprobs import (
    LogprobTensors,
    RankedLogits,
    TokenLogprobs,
    rank_logits,
    rank_logits_reference,
    token_log_probabilities,
    token_log_probabilities_reference,
)
from graphengine.kernels.logits.logprobs_mailbox import (
    logprob_items,
    publish_logprobs,
    publish_logprobs_reference,
)
from graphengine.kernels.logits.logprobs_triton import MAX_LOGPROBS
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    launches_handed_to,
)

# Broken rows have NaNs to compute on, in the interpreter by numpy.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide):RuntimeWarning")

INF, NAN = float("inf"), float("nan")
HUGE, LOWEST = 2**31 - 1, -(2**31)
UNTOUCHED = -3


class Row(NamedTuple):
    """A row's slot and tokens, of which the first `count` are emitted; and what the slot wants."""

    slot: int
    tokens: Sequence[int]
    count: int
    wanted: int
    raw: bool = False


class Results(NamedTuple):
    ranked: RankedLogits
    tokens: TokenLogprobs


def expected_top(logits_V: np.ndarray, n: int) -> list[int]:
    """The n largest by logit and then by lower id, of those that are more than -inf."""
    ids = [i for i, x in enumerate(logits_V) if x > -INF]
    return sorted(ids, key=lambda i: (-logits_V[i], i))[:n]


@dataclass(frozen=True)
class Twin:
    device: str
    reference: bool

    def ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def run(
        self,
        logits: np.ndarray,
        raw: np.ndarray | None,
        rows: Sequence[Row | None],
        width: int,
        *,
        vocabulary: int | None = None,
        stride: int = 0,
        slots: int = 6,
    ) -> tuple[Results, dict[str, Any]]:
        """Both ops; and the arguments that publishing needs."""
        wide = torch.full((logits.shape[0], logits.shape[1] + stride), 99.0, device=self.device)
        wide[:, : logits.shape[1]] = torch.from_numpy(logits)
        slot, token = [-1] * len(logits), [HUGE] * len(logits)
        count, wanted, raws = [HUGE] * len(rows), [HUGE] * slots, [HUGE] * slots
        for r, row in enumerate(rows):
            if row is None:
                continue
            for j, each in enumerate(row.tokens):
                slot[r * width + j], token[r * width + j] = row.slot, each
            count[r], wanted[row.slot], raws[row.slot] = row.count, row.wanted, int(row.raw)
        wants = LogprobTensors(self.ints(wanted), self.ints(raws))
        shared: dict[str, Any] = {
            "vocabulary": vocabulary,
            "raw_NV": None if raw is None else torch.tensor(raw, device=self.device),
        }
        view = wide[:, : logits.shape[1]]
        rank = rank_logits_reference if self.reference else rank_logits
        ranked = rank(view, self.ints(slot), wants, **shared)
        op = token_log_probabilities_reference if self.reference else token_log_probabilities
        counts = self.ints(count)
        tokens = op(view, self.ints(token), counts, self.ints(slot), wants, ranked, **shared)
        publishing = {
            "count_R": counts,
            "slot_N": self.ints(slot),
            "wants": wants,
            "ranked": ranked,
            "tokens": tokens,
        }
        return Results(ranked, tokens), publishing

    def check(
        self,
        logits: np.ndarray,
        raw: np.ndarray | None,
        rows: Sequence[Row | None],
        width: int,
        *,
        vocabulary: int | None = None,
        stride: int = 0,
    ) -> None:
        """Every live lane that wants something, against log_softmax and sorting."""
        results, _ = self.run(logits, raw, rows, width, vocabulary=vocabulary, stride=stride)
        ranked = [tensor.cpu().numpy() for tensor in results.ranked]
        values, ranks = (tensor.cpu().numpy() for tensor in results.tokens)
        for r, row in enumerate(rows):
            if row is None or row.wanted < 0:
                continue
            for j, token in enumerate(row.tokens):
                lane = r * width + j
                source = raw if row.raw and raw is not None else logits
                logits_V = source[lane, :vocabulary]
                logprobs = torch.from_numpy(logits_V.copy()).log_softmax(0).numpy()
                close = {"rtol": 0, "atol": 1e-5, "equal_nan": True}
                n = min(row.wanted, MAX_LOGPROBS)
                ids = expected_top(logits_V, n)
                rest = MAX_LOGPROBS - len(ids)
                assert ranked[2][lane].tolist() == ids + [-1] * rest
                np.testing.assert_allclose(ranked[3][lane, : len(ids)], logprobs[ids], **close)
                assert (ranked[3][lane, len(ids) :] == -INF).all()
                if j < row.count:
                    np.testing.assert_allclose(values[lane], logprobs[token], **close)
                    assert ranks[lane] == 1 + np.count_nonzero(logits_V > logits_V[token])


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin("cpu", reference=True)
    return Twin(request.getfixturevalue("device"), reference=False)


@settings(deadline=None, max_examples=extent(11, 35), derandomize=True)
@given(data=st.data())
def test_equals_log_softmax(twin: Twin, data: st.DataObject):
    """Rows of several tokens among padded ones, ties and masked ids everywhere, any tiles."""
    vocabulary = data.draw(st.sampled_from([1, 5, 32, 70, 100]))
    width = data.draw(st.sampled_from([1, 1, 2, 4]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows: list[Row | None] = []
    for slot in data.draw(st.permutations(range(6)))[: data.draw(st.integers(1, 3))]:
        live = data.draw(st.integers(1, width))
        rows.append(
            Row(
                slot,
                rng.integers(0, vocabulary, live).tolist(),
                data.draw(st.integers(0, live)),
                data.draw(st.sampled_from([-1, 0, 1, 3, 20, 1000])),
                data.draw(st.booleans()),
            )
        )
    rows = data.draw(st.permutations([*rows, *[None] * data.draw(st.integers(0, 2))]))
    columns = vocabulary + data.draw(st.sampled_from([0, 9]))
    shape = (len(rows) * width, columns)

    def draw_logits() -> np.ndarray:
        scale = data.draw(st.sampled_from([0.0, 1.0, 30.0, 1000.0]))
        logits = (rng.normal(size=shape) * scale).astype(np.float32)
        if data.draw(st.booleans()):
            logits = logits.round()
        logits[rng.random(shape) < data.draw(st.sampled_from([0.0, 0.3, 0.97]))] = -INF
        logits[:, vocabulary:] = rng.choice([NAN, INF, 1e9])
        return logits

    raw = draw_logits() if data.draw(st.booleans()) else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", data.draw(st.sampled_from([8, 32, 4096])))
        patch.setattr(module, "_TOKEN_BLOCK", data.draw(st.sampled_from([16, 16384])))
        twin.check(
            draw_logits(),
            raw,
            rows,
            width,
            vocabulary=None if columns == vocabulary else vocabulary,
            stride=data.draw(st.sampled_from([0, 3])),
        )


def test_a_large_vocabulary(twin: Twin):
    """Whole tiles and a part of one; all in one tile, and spread."""
    vocabulary = 12_301
    rng = np.random.default_rng(1)
    logits = (4 * rng.normal(size=(4, vocabulary))).astype(np.float32)
    logits[1, 4096:4120] += 40
    logits[2] = logits[2].round()
    rows = [Row(s, [int(logits[s].argmax())], 1, n) for s, n in enumerate([20, 20, 20, 0])]
    twin.check(logits, None, rows, 1)


def test_far_from_zero(twin: Twin):
    """Where a log-sum-exp in float32 would be off by more than 1e-5."""
    logits = np.float32(20_000) + np.arange(50, dtype=np.float32)[None] / 64
    twin.check(logits, None, [Row(0, [7], 1, 5)], 1)
    twin.check(-logits, None, [Row(0, [7], 1, 5)], 1)


def test_broken_logits(twin: Twin):
    """A NaN or +inf makes all of the row NaN, as PyTorch does; the order stays. All -inf is NaN."""
    logits = np.array(
        [[1.0, NAN, 3.0, 2.0], [1.0, INF, 3.0, 2.0], [-INF] * 4, [1.0, -INF, -INF, 0.0]],
        np.float32,
    )
    rows = [Row(s, [3], 1, 3) for s in range(4)]
    results, _ = twin.run(logits, None, rows, 1)
    assert results.ranked.top_id[:, :3].tolist() == [[2, 3, 0], [1, 2, 3], [-1] * 3, [0, 3, -1]]
    assert results.ranked.top_value[:2, :3].isnan().all()
    assert (results.ranked.top_value[2] == -INF).all()
    assert results.tokens.value.isnan().tolist() == [True, True, True, False]
    twin.check(logits[1:], None, rows[:3], 1)


def test_equal_logits_share_the_best_rank(twin: Twin):
    logits = np.array([[1.0, 2.0, 2.0, 0.0, 2.0, -0.0]] * 4, np.float32)
    rows = [Row(s, [token], 1, 6) for s, token in enumerate([1, 4, 0, 3])]
    results, _ = twin.run(logits, None, rows, 1)
    assert results.tokens.rank.tolist() == [1, 1, 4, 5]
    assert results.ranked.top_id[0, :6].tolist() == [1, 2, 4, 0, 3, 5]


def test_a_prompt(twin: Twin):
    """Lanes of a chunk: the token after each, asked for one by one."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(5, 33)).astype(np.float32)
    rows = [Row(2, [int(t)], int(t % 2), 4) for t in rng.integers(0, 33, 4)]
    twin.check(logits, None, [*rows, None], 1)


def test_only_what_is_wanted_is_written(twin: Twin):
    """What the other lanes hold is left as it was allocated: nothing is read for them either."""
    logits = np.zeros((4, 7), np.float32)
    rows = [Row(0, [1, 2], 1, 2), Row(1, [3, 4], 2, -1)]
    results, _ = twin.run(logits, None, rows, 2)
    assert results.ranked.top_id.shape == (4, MAX_LOGPROBS)
    assert results.ranked.top_id[:2, :3].tolist() == [[0, 1, -1]] * 2


# Publishing.


def read(items: Sequence[int], tag: int, count: int, n: int, top: int) -> list[Any]:
    """Each token's (log-probability, rank, ids, log-probabilities), as the host reads them."""
    tokens = []
    for j in range(count):
        mine = items[j * logprob_items(top) :][: 2 + 2 * n]
        assert {item >> 32 & 0xFFFFFFFF for item in mine} == {tag}

        def number(item: int) -> float:
            return float(struct.unpack("<f", struct.pack("<I", item & 0xFFFFFFFF))[0])

        ids = [struct.unpack("<i", struct.pack("<I", i & 0xFFFFFFFF))[0] for i in mine[2::2]]
        tokens.append((number(mine[0]), mine[1] & 0xFFFFFFFF, ids, [*map(number, mine[3::2])]))
    return tokens


@pytest.mark.parametrize("sequence", [7, 2**31 + 5, 2**32 - 1, 2**40 + 2])
@pytest.mark.parametrize("top", [0, 3, 20])
def test_publishing(twin: Twin, sequence: int, top: int):
    rng = np.random.default_rng(top)
    width, vocabulary = 3, 9
    logits = rng.normal(size=(5 * width, vocabulary)).astype(np.float32)
    # Fewer candidates than are wanted.
    logits[:3, 2:] = -INF
    rows = [
        Row(4, [0, 1, 1], 2, 3),
        None,
        Row(1, [3, 4], 2, 20),
        Row(2, [3], 1, -1),
        Row(0, [8, 7, 6], 3, 0),
    ]
    results, arguments = twin.run(logits, None, rows, width)
    items = width * logprob_items(top) + 1
    pinned = twin.device == "cuda"
    mailbox = torch.full((3, 7, items), UNTOUCHED, dtype=torch.int64, pin_memory=pinned)
    counted = torch.tensor([sequence], dtype=torch.int64, device=twin.device)
    op = publish_logprobs_reference if twin.reference else publish_logprobs
    op(mailbox, counted, **arguments, top=top)
    if pinned:
        torch.cuda.synchronize()
    assert counted.tolist() == [sequence]
    for entry in range(3):
        for lane in range(7):
            row = rows[lane] if lane < len(rows) and entry == sequence % 3 else None
            found = mailbox[entry, lane].tolist()
            written = 0
            if row is not None and row.wanted >= 0:
                n = min(row.wanted, top)
                written = row.count * (2 + 2 * n)
                first = lane * width
                assert read(found, sequence & 0xFFFFFFFF, row.count, n, top) == [
                    (
                        results.tokens.value[first + j].item(),
                        results.tokens.rank[first + j].item(),
                        results.ranked.top_id[first + j, :n].tolist(),
                        results.ranked.top_value[first + j, :n].tolist(),
                    )
                    for j in range(row.count)
                ]
            assert items - found.count(UNTOUCHED) == written


# What does not fit.


def floats(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def good_ranked(lanes: int = 4) -> RankedLogits:
    return RankedLogits(floats(lanes), floats(lanes), ints(lanes, 20), floats(lanes, 20))


def good_arguments(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "logits_NV": floats(4, 9),
        "token_N": ints(4),
        "count_R": ints(2),
        "slot_N": ints(4),
        "wants": LogprobTensors(ints(3), ints(3)),
        "ranked": good_ranked(),
    }
    return good | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits_NV": floats(4, 9).double()}, r"logits must be float32 \[N, V\]"),
        ({"logits_NV": floats(3, 9)}, r"slot must be a dense \[3\], not \(4,\)"),
        ({"vocabulary": 10}, r"vocabulary=10 is outside 1 \.\. 9"),
        ({"raw_NV": floats(4, 8)}, r"raw must be float32 \[4, 9\] with dense rows, .* \[4, 8\]"),
        ({"raw_NV": floats(9, 4).t()}, r"raw must be float32 .* strides \(1, 4\)"),
        ({"wants": LogprobTensors(ints(3), ints(2))}, r"raw must be a dense \[3\], not \(2,\)"),
    ],
)
def test_wrong_logits_are_refused(changes: dict[str, Any], message: str):
    arguments = good_arguments(**changes)
    with pytest.raises(ValueError, match=message):
        token_log_probabilities(**arguments)
    for name in ("token_N", "count_R", "ranked"):
        del arguments[name]
    with pytest.raises(ValueError, match=message):
        rank_logits(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_N": ints(3)}, r"token must be a dense \[4\], not \(3,\)"),
        ({"count_R": ints(3)}, r"4 lanes are no whole number of lanes for each of 3 rows"),
        ({"ranked": good_ranked(3)}, r"largest must be .* \[4\], not torch.float32 \(3,\)"),
        (
            {"ranked": good_ranked()._replace(top_id=ints(4, 19))},
            r"top_id must be a dense torch.int32 \[4, 20\], not torch.int32 \[4, 19\]",
        ),
    ],
)
def test_wrong_tokens_are_refused(changes: dict[str, Any], message: str):
    token_log_probabilities(**good_arguments())
    with pytest.raises(ValueError, match=message):
        token_log_probabilities(**good_arguments(**changes))


def good_publishing(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "mailbox_items": torch.zeros(2, 2, 16, dtype=torch.int64),
        "sequence_1": torch.zeros(1, dtype=torch.int64),
        "tokens": TokenLogprobs(floats(4), ints(4)),
        "top": 3,
    }
    good |= {name: good_arguments()[name] for name in ("count_R", "slot_N", "wants", "ranked")}
    return good | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top": 21}, r"top=21, not 0\.\.20"),
        ({"top": -1}, r"top=-1, not 0\.\.20"),
        ({"top": 4}, r"2 tokens of 10 items do not fit a mailbox of 16 items a lane"),
        ({"mailbox_items": ints(2, 2, 16)}, r"mailbox must be a dense int64"),
        (
            {"mailbox_items": torch.zeros(2, 1, 16, dtype=torch.int64)},
            r"2 rows do not fit a mailbox of 2 entries x 1 lanes",
        ),
        ({"sequence_1": ints(1)}, r"sequence must be a dense torch.int64 \[1\]"),
        ({"tokens": TokenLogprobs(floats(4), ints(3))}, r"rank must be a dense \[4\], not \(3,\)"),
        ({"tokens": TokenLogprobs(floats(3), ints(4))}, r"value must be .* \[4\], .* \(3,\)"),
    ],
)
def test_wrong_publishing_is_refused(changes: dict[str, Any], message: str):
    publish_logprobs(**good_publishing())
    with pytest.raises(ValueError, match=message):
        publish_logprobs(**good_publishing(**changes))


# What a GPU does.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
@pytest.mark.parametrize("pdl", [False, True])
def test_a_captured_chain_gives_the_same_bits(pdl: bool):
    """And a lane's bits depend neither on the others nor on how many there are."""
    vocabulary = 128_256
    logits = 3 * torch.randn(16, vocabulary, device="cuda")
    slot = torch.arange(16, dtype=torch.int32, device="cuda") // 4
    slot[[3, 7]] = -1
    token = torch.randint(0, vocabulary, (16,), dtype=torch.int32, device="cuda")
    wants = LogprobTensors(*(torch.tensor(x).int().cuda() for x in ([20, 5, 0, 7], [0] * 4)))

    def chain(lanes: slice, count: torch.Tensor) -> list[torch.Tensor]:
        ranked = rank_logits(logits[lanes], slot[lanes], wants, pdl=pdl)
        tokens = token_log_probabilities(
            logits[lanes], token[lanes], count, slot[lanes], wants, ranked, pdl=pdl
        )
        return [*ranked, *tokens]

    live = slot >= 0
    count = torch.tensor([3, 3, 4, 4], dtype=torch.int32, device="cuda")
    expected = chain(slice(0, 16), count)
    logprobs = logits.log_softmax(1).gather(1, token[:, None].long())[:, 0]
    torch.testing.assert_close(expected[4][live], logprobs[live], rtol=0, atol=1e-5)
    alone = chain(slice(8, 12), count[2:3])
    assert all(torch.equal(part, whole[8:12]) for part, whole in zip(alone, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(slice(0, 16), count)
    for _ in range(20):
        for tensor in captured:
            tensor.fill_(-5)
        graph.replay()
        for actual, wanted in zip(captured, expected, strict=True):
            assert torch.equal(actual[live], wanted[live])


# What the PTX says.


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("kernel", ["rank_tile", "rank_merge", "token", "_publish"])
def test_what_is_new_is_read_after_the_wait(kernel: str, raw: bool):
    V, N, S = 128_256, 8, 4

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    float32, wants = torch.float32, LogprobTensors(new(S), new(S))
    logits = new(N, V, dtype=float32)
    ranked = RankedLogits(
        new(N, dtype=float32), new(N, dtype=float32), new(N, 20), new(N, 20, dtype=float32)
    )
    tokens = TokenLogprobs(new(N, dtype=float32), new(N))
    options: dict[str, Any] = {"raw_NV": torch.empty_like(logits) if raw else None, "pdl": True}
    mailbox, sequence = (new(*shape, dtype=torch.int64) for shape in ((4, 2, 200), (1,)))

    def call() -> None:
        if kernel.startswith("rank"):
            rank_logits(logits, new(N), wants, **options)
        elif kernel == "token":
            arguments = logits, new(N), new(2), new(N), wants, ranked
            token_log_probabilities(*arguments, **options)
        else:
            publish_logprobs(
                mailbox, sequence, new(2), new(N), wants, ranked, tokens, top=20, pdl=True
            )

    launches: list[Op] = []
    with launches_handed_to(launches.append, publish_module if kernel == "_publish" else module):
        call()
    # Ranks are two launches.
    (launch,) = (op for op in launches if op.name.removeprefix("_").startswith(kernel.strip("_")))
    assert launch.grid == ((N, 32) if kernel == "rank_tile" else (N,))
    ptx, names = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    early = {load.argument for load in loads if not load.after_wait}
    wants_raw = {"wants_raw_ptr"} if raw and kernel != "_publish" else set()
    assert early == {"slot_ptr", "wanted_ptr"} | wants_raw
    assert all(
        load.past_l1 for load in loads if load.argument == "slot_ptr" and not load.after_wait
    )
