"""The last kernel of a speculative step: which drafts are accepted, and where the row is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.linear.residual import new_residual
from graphengine.kernels.step.begin import gather_and_embed
from graphengine.kernels.step.finish import verify_commit_publish
from graphengine.kernels.step.state import EMITTED, INVALID, LENGTH, STOP
from launches.finish import HUGE, LAST_ID, LOWEST, Twin, read_entry

EPOCH = 41
KV_LEN = 9


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin("cpu", reference=True)
    return Twin(request.getfixturevalue("device"), reference=False)


@dataclass(kw_only=True)
class Row:
    """One row of a step: drafts fed after the query, and what each of those lanes sampled."""

    drafts: list[int]
    sampled: list[int]
    """One more than drafts; -1 without valid logits."""
    relaxed: list[int] = field(default_factory=list)
    """For each draft whether it is accepted by the relaxed rule."""
    stop_ids: list[int] = field(default_factory=lambda: [-1, -1, -1])
    max_len: int = HUGE
    slot: int = 0

    def chosen(self, forced: int | None = None) -> list[int]:
        """Every lane's token, whether the row is cut before it or not."""
        tokens = list(self.sampled)
        for j, draft in enumerate(self.drafts):
            relaxed = self.relaxed and self.relaxed[j] and forced is None and tokens[j] >= 0
            if not relaxed and tokens[j] != draft:
                break
            tokens[j] = draft
        return tokens

    def walk(self, forced: int | None = None) -> tuple[list[int], int]:
        """(tokens emitted, flags), one token after the other."""
        emitted: list[int] = []
        flags = 0
        for j, token in enumerate(self.sampled):
            if token < 0:
                return emitted, EMITTED if emitted else INVALID
            accepted = False
            if j < len(self.drafts):
                accepted = token == self.drafts[j]
                if forced is not None:
                    accepted = j < forced
                elif self.relaxed and self.relaxed[j]:
                    accepted, token = True, self.drafts[j]
            emitted.append(token)
            flags = EMITTED | STOP * (token in self.stop_ids)
            flags |= LENGTH * (KV_LEN + len(emitted) + 1 >= self.max_len)
            if flags != EMITTED or not accepted:
                break
        return emitted, flags


def check_step(
    twin: Twin,
    rows: Sequence[Row | None],
    drafts: int,
    *,
    items: int | None = None,
    tiles: int = 3,
    relaxed: bool = False,
    forced: int | None = None,
    table_columns: int = 0,
) -> None:
    """One step of these rows, None for a padded one, against `Row.walk`."""
    width = drafts + 1
    items = items or width + 1
    slots = 1 + max((row.slot for row in rows if row), default=0)
    state, limits = twin.state(slots, sequence=6), twin.limits(slots)
    state.running.fill_(1)
    state.kv_len.fill_(KV_LEN)
    state.next_token.fill_(77)
    state.epoch.fill_(EPOCH)
    slot, fed, sampled, accept = ([] for _ in range(4))
    for row in rows:
        # What no lane is fed holds poison: tokens, tiles and flags that would be accepted.
        live = 0 if row is None else len(row.sampled)
        slot += [row.slot if row else 0] * live + [LOWEST, -1] * width
        fed += [LOWEST, *row.drafts][:live] if row else []
        fed += [HUGE - 1] * (width - live)
        sampled += [*(row.sampled if row else []), *[None] * (width - live)]
        accept += [*((row.relaxed or [0] * len(row.drafts)) if row else [])]
        accept += [1] * (width - max(live - 1, 0))
        slot, accept = slot[: len(fed)], accept[: len(fed)]
        if row:
            limits.stop_ids[row.slot] = twin.ints(row.stop_ids)
            limits.max_len[row.slot] = row.max_len
    mailbox = twin.mailbox(4, len(rows) + 1, items)
    wide = torch.full((slots, table_columns + 3), 5, dtype=torch.int32, device=twin.device)
    table = wide[:, :table_columns] if table_columns else None

    step = twin.finish(
        *twin.tiles(sampled, tiles),
        twin.lanes(slot, fed),
        state,
        limits,
        mailbox,
        num_speculative_tokens=drafts,
        relaxed_N=twin.ints(accept) if relaxed else None,
        forced=forced,
        draft_SK=table,
    )
    records: list[Any] = []
    running, kv_len, next_token = [1] * slots, [KV_LEN] * slots, [77] * slots
    used = [False] * slots
    for r, row in enumerate(rows):
        emitted, flags = row.walk(forced) if row else ([], 0)
        assert (step.flags[r], step.count[r]) == (flags, len(emitted)), row
        records.append((7, tuple(emitted), EPOCH if row else 0, flags))
        if row is None:
            continue
        assert step.token[r * width :][: len(row.sampled)] == row.chosen(forced)
        used[row.slot] = True
        running[row.slot] = int(flags == EMITTED)
        kv_len[row.slot] += max(len(emitted), 1)
        next_token[row.slot] = [77, *emitted][-1]
    assert read_entry(mailbox, 3) == [*records, None]
    assert [read_entry(mailbox, entry) for entry in (0, 1, 2)] == [[None] * (len(rows) + 1)] * 3
    assert state.running.tolist() == running
    assert state.kv_len.tolist() == kv_len
    assert state.next_token.tolist() == next_token
    assert (state.sequence.tolist(), state.epoch.tolist()) == ([7], [EPOCH] * slots)
    for number in range(slots):
        expected = [-1 if used[number] else 5] * table_columns + [5] * 3
        assert wide[number].tolist() == expected


ROWS = {
    "worked example": (Row(drafts=[4, 5, 0], sampled=[4, 5, 6, 7]), [4, 5, 6], EMITTED),
    "all accepted": (Row(drafts=[4, 5, 6], sampled=[4, 5, 6, 7]), [4, 5, 6, 7], EMITTED),
    "none accepted": (Row(drafts=[5, 6, 7], sampled=[4, 5, 6, 7]), [4], EMITTED),
    "a match after a mismatch": (Row(drafts=[4, 0, 6], sampled=[4, 5, 6, 7]), [4, 5], EMITTED),
    "one draft was absent": (Row(drafts=[4, 5], sampled=[4, 5, 6]), [4, 5, 6], EMITTED),
    "no draft at all": (Row(drafts=[], sampled=[4]), [4], EMITTED),
    "a stop id among the accepted": (
        Row(drafts=[4, 5, 6], sampled=[4, 5, 6, 7], stop_ids=[-1, 9, 5]),
        [4, 5],
        EMITTED | STOP,
    ),
    "a stop id after the accepted": (
        Row(drafts=[4, 0, 6], sampled=[4, 5, 6, 7], stop_ids=[6, 0, 7]),
        [4, 5],
        EMITTED,
    ),
    "the length is reached": (
        Row(drafts=[4, 5, 6], sampled=[4, 5, 6, 7], max_len=KV_LEN + 3),
        [4, 5],
        EMITTED | LENGTH,
    ),
    "both at once": (
        Row(drafts=[4, 5], sampled=[4, 5, 6], max_len=KV_LEN + 4, stop_ids=[6, -1, -1]),
        [4, 5, 6],
        EMITTED | LENGTH | STOP,
    ),
    "no valid logits": (Row(drafts=[4, 5, 6], sampled=[-1, 5, 6, 7]), [], INVALID),
    "no valid logits after a draft": (
        Row(drafts=[4, 5, 6], sampled=[4, 5, -1, 7]),
        [4, 5],
        EMITTED,
    ),
    "no valid logits where none was accepted": (
        Row(drafts=[4, 5, 6], sampled=[4, 6, -1, -1]),
        [4, 6],
        EMITTED,
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_one_row(twin: Twin, case: str):
    row, emitted, flags = ROWS[case]
    assert row.walk() == (emitted, flags), "the walk of the tests is wrong"
    check_step(twin, [row], 3)
    check_step(twin, [None, row, None], 3, items=9, table_columns=3)


def test_a_relaxed_draft_is_what_is_emitted(twin: Twin):
    row = Row(drafts=[40, 5, 60], sampled=[4, 5, 6, 7], relaxed=[1, 0, 1])
    assert row.walk() == ([40, 5, 60, 7], EMITTED)
    check_step(twin, [row], 3, relaxed=True)
    # It stops the request like any other, and after a mismatch it counts for nothing.
    row = Row(drafts=[40, 5, 60], sampled=[4, 5, 6, 7], relaxed=[1, 0, 1], stop_ids=[40, 4, -1])
    assert row.walk() == ([40], EMITTED | STOP)
    check_step(twin, [row], 3, relaxed=True)
    row = Row(drafts=[40, 0, 60], sampled=[4, 5, 6, 7], relaxed=[1, 0, 1])
    assert row.walk() == ([40, 5], EMITTED)
    check_step(twin, [row], 3, relaxed=True)
    # Without valid logits there is nothing to relax.
    row = Row(drafts=[40, 50, 60], sampled=[4, -1, 6, 7], relaxed=[1, 1, 1])
    assert row.walk() == ([40], EMITTED)
    check_step(twin, [row], 3, relaxed=True)


@pytest.mark.parametrize("forced", [0, 1, 2, 3, 100])
def test_forced_acceptance_emits_what_was_sampled(twin: Twin, forced: int):
    tokens = [4, 5, 6, 7]
    rows = [
        Row(drafts=[9, 9, 9], sampled=tokens, slot=0),
        Row(drafts=[4, 5, 6], sampled=tokens, slot=1),
        Row(drafts=[9], sampled=tokens[:2], slot=2),
        Row(drafts=[9, 9, 9], sampled=tokens, stop_ids=[5, -1, -1], slot=3),
    ]
    assert rows[0].walk(forced)[0] == tokens[: forced + 1]
    check_step(twin, rows, 3, forced=forced)
    check_step(twin, rows, 3, forced=forced, relaxed=True)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Row | None], int]:
    """Rows and K; most drafts are right, so that walks are long."""
    drafts = draw(st.sampled_from([0, 1, 2, 3, 4, 7, 14, 31]))
    slots = draw(st.permutations(range(6)))[: draw(st.integers(1, 5))]
    token = st.sampled_from([0, 0, 0, 1, 70_000, LAST_ID - 1])
    sampled = st.one_of(*[token] * 12, st.just(-1))
    stops = st.sampled_from([-1, -1, -1, 0, 1, 2])
    rows: list[Row | None] = []
    for slot in slots:
        fed = draw(st.integers(0, drafts))
        rows.append(
            Row(
                drafts=draw(st.lists(token, min_size=fed, max_size=fed)),
                sampled=draw(st.lists(sampled, min_size=fed + 1, max_size=fed + 1)),
                relaxed=draw(st.lists(st.integers(0, 1), min_size=fed, max_size=fed)),
                stop_ids=draw(st.lists(stops, min_size=3, max_size=3)),
                max_len=KV_LEN + draw(st.sampled_from([1, 2, 3, 4, 5, 12, 100])),
                slot=slot,
            )
        )
    padded = [None] * draw(st.integers(0, 2))
    return draw(st.permutations([*rows, *padded])), drafts


@given(step=steps(), data=st.data())
@settings(max_examples=extent(20, 60), deadline=None, derandomize=True)
def test_matches_a_walk_in_plain_python(
    twin: Twin, step: tuple[list[Row | None], int], data: st.DataObject
):
    rows, drafts = step
    mode = data.draw(st.sampled_from(["strict", "relaxed", "forced"]))
    if mode != "relaxed":
        for row in rows:
            if row:
                row.relaxed = []
    check_step(
        twin,
        rows,
        drafts,
        items=drafts + 2 + data.draw(st.sampled_from([0, 0, 1, 5])),
        tiles=data.draw(st.sampled_from([1, 2, 3, 17])),
        relaxed=mode == "relaxed",
        forced=data.draw(st.integers(0, 6)) if mode == "forced" else None,
        table_columns=data.draw(st.sampled_from([0, max(drafts, 1), 33])),
    )


@pytest.mark.parametrize("tiles", [100, 4097, 8200])
def test_any_number_of_tiles(twin: Twin, tiles: int):
    accepted = Row(drafts=[LAST_ID - 5, 3, 70_000], sampled=[LAST_ID - 5, 3, 70_000, 1], slot=1)
    cut = Row(drafts=[2, 1], sampled=[2, -1, 1], slot=0)
    check_step(twin, [accepted, None, cut], 3, tiles=tiles)
    if tiles == 100:
        rows = [Row(drafts=[*range(31)], sampled=[*range(32)])]
        check_step(twin, rows, 31, tiles=tiles)


def test_relaxed_flags_of_a_plain_step_are_not_read(twin: Twin):
    check_step(twin, [Row(drafts=[], sampled=[4]), None], 0, relaxed=True, forced=3, items=5)


# Both kernels of the step: a request gets the tokens that plain decoding gives it.


def _target(lanes: Any) -> list[int | None]:
    """What a target would sample: any function of token and position does; None where padded."""
    tokens: list[int | None] = []
    fields = (tensor.tolist() for tensor in lanes)
    for token, slot, position in zip(*fields, strict=True):
        tokens.append((token * 7 + position * 3 + slot) % 11 if slot >= 0 else None)
    return tokens


def _generate(
    twin: Twin, widths: Sequence[int], lengths: Sequence[int], drafts: torch.Tensor
) -> tuple[list[list[int]], list[int]]:
    """(tokens, last flags) of three requests, decoded in steps of `widths` again and again.

    Of `drafts` [step, slot, 3], 0 means the right one, 1 a wrong one, 2 none.
    """
    slots = 3
    state, limits = twin.state(slots), twin.limits(slots)
    state.running.fill_(1)
    state.kv_len.copy_(twin.ints([0, 5, 2]))
    limits.max_len.copy_(twin.ints(lengths))
    limits.stop_ids[2] = twin.ints([10, -1, 9])
    embedding, weight = torch.ones(11, 4, device=twin.device), torch.ones(4, device=twin.device)
    table = torch.full((slots, 5), -1, dtype=torch.int32, device=twin.device)
    command, rows = twin.ints([0] * slots), twin.ints([2, -1, 0, 1])
    mailbox = twin.mailbox(2, 4, 5)
    tokens: list[list[int]] = [[] for _ in range(slots)]
    flags = [0] * slots
    for number in range(60):
        width = widths[number % len(widths)]
        residual = new_residual(4 * width, 4, 1, dtype=torch.float32, device=twin.device)
        lanes = twin.begin(
            *(state, command, rows, embedding, weight, residual),
            draft_SK=table,
            max_len_S=limits.max_len,
            num_speculative_tokens=width - 1,
        )
        twin.finish(
            *twin.tiles(_target(lanes)),
            *(lanes, state, limits, mailbox),
            num_speculative_tokens=width - 1,
            draft_SK=table,
        )
        for record, slot in zip(read_entry(mailbox, (number + 1) % 2), rows.tolist(), strict=True):
            assert record is not None
            if record.flags:
                tokens[slot] += record.tokens
                flags[slot] = record.flags
        if not state.running.any():
            return tokens, flags
        for slot in range(slots):
            token, position = state.next_token[slot].item(), state.kv_len[slot].item()
            for k, kind in enumerate(drafts[number, slot].tolist()):
                token = (token * 7 + (position + k) * 3 + slot) % 11
                table[slot, k] = (token, (token + 1) % 11, -1)[kind]
    raise AssertionError(f"still running: {state}")


@pytest.mark.parametrize(
    ("widths", "right"), [((2,), 0.7), ((4,), 0.3), ((4,), 1.0), ((4, 1, 3), 0.9)]
)
def test_tokens_are_those_of_plain_decoding(twin: Twin, widths: tuple[int, ...], right: float):
    draw = torch.Generator().manual_seed(len(widths))
    for lengths in ([14, 21, 23], [2, 7, 3]):
        plain = _generate(twin, [1], lengths, torch.zeros(60, 3, 3, dtype=torch.int64))
        wrong = torch.randint(1, 3, (60, 3, 3), generator=draw)
        drafts = wrong * (torch.rand(60, 3, 3, generator=draw) >= right)
        assert _generate(twin, widths, lengths, drafts) == plain
        assert [len(tokens) for tokens in plain[0]][:2] == [lengths[0] - 1, lengths[1] - 6]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
@pytest.mark.parametrize("pdl", [False, True])
def test_a_captured_step_accepts_cuts_and_goes_on(pdl: bool):
    twin = Twin("cuda", reference=False)
    state, limits = twin.state(4), twin.limits(4)
    state.running.fill_(1)
    limits.max_len[3] = 8
    mailbox = twin.mailbox(3, 3, 6)
    command, rows = twin.ints([0] * 4), twin.ints([3, -1, 0])
    arrivals = twin.ints([0])
    table = torch.full((4, 3), -1, dtype=torch.int32, device="cuda")
    embedding, weight = torch.ones(100, 8, device="cuda"), torch.ones(8, device="cuda")
    residual = new_residual(12, 8, 1, dtype=torch.float32, device="cuda")
    health = torch.ones(12, 1, dtype=torch.int32, device="cuda")

    def step() -> None:
        lanes = gather_and_embed(
            *(state, command, rows, embedding, weight, residual),
            draft_SK=table,
            max_len_S=limits.max_len,
            num_speculative_tokens=3,
            pdl=pdl,
        )
        # The next token is the position; slot 0 is always given right drafts, slot 3 two of them.
        best = (LAST_ID - lanes.position.long())[:, None]
        verify_commit_publish(
            *(best, health, lanes, state, limits, mailbox, Launch(arrivals=arrivals, pdl=pdl)),
            num_speculative_tokens=3,
            draft_SK=table,
        )
        ahead = torch.arange(3, device="cuda", dtype=torch.int32)
        table.copy_(state.kv_len[:, None] + ahead)
        table[3, 2].fill_(99)

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    # The first step had no drafts.
    assert state.kv_len.tolist() == [1, 0, 0, 1]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert arrivals.tolist() == [0]
    # 1, 5, 9, 13 tokens; 1, 4, 7 of which the last reaches max_len.
    assert state.kv_len.tolist() == [13, 0, 0, 7]
    assert state.running.tolist() == [1, 1, 1, 0]
    assert read_entry(mailbox, 4 % 3) == [(4, (), 0, 0), (4, (), 0, 0), (4, (9, 10, 11, 12), 0, 1)]
    assert read_entry(mailbox, 3 % 3)[0] == (3, (4, 5, 6), 0, EMITTED | LENGTH)


def _good_arguments() -> tuple[list[Any], dict[str, Any]]:
    twin = Twin("cpu", reference=False)
    arguments = [
        *twin.tiles([1, 2, 3, 4]),
        twin.lanes([0, 0, 1, 1]),
        twin.state(4),
        twin.limits(4),
        twin.mailbox(2, 3, 3),
        Launch(arrivals=twin.ints([0])),
    ]
    options = {
        "num_speculative_tokens": 1,
        "relaxed_N": twin.ints([0] * 4),
        "draft_SK": torch.zeros(4, 1, dtype=torch.int32),
    }
    return arguments, options


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("num_speculative_tokens", -1, r"num_speculative_tokens=-1, not 0\.\.31"),
        ("num_speculative_tokens", 32, r"num_speculative_tokens=32, not 0\.\.31"),
        ("num_speculative_tokens", 2, r"4 lanes must be rows of 3"),
        ("num_speculative_tokens", 3, r"of 5 items a lane or more for 4 tokens .* not 3"),
        ("num_speculative_tokens", 0, r"4 rows do not fit a mailbox of 2 entries x 3 lanes"),
        ("relaxed_N", torch.zeros(3, dtype=torch.int32), r"relaxed must be a dense \[4\]"),
        ("relaxed_N", torch.zeros(4), r"relaxed must be int32"),
        ("forced", -1, r"forced=-1 must be 0 or more, or None"),
        ("draft_SK", torch.zeros(4, 1), r"draft must be int32 \[4, 1 or more\].*float32"),
        ("draft_SK", torch.zeros(4, dtype=torch.int32), r"draft must be .* \(4,\)"),
        ("draft_SK", torch.zeros(3, 1, dtype=torch.int32), r"draft must be .* \(3, 1\)"),
        ("draft_SK", torch.zeros(4, 0, dtype=torch.int32), r"draft must be .* \(4, 0\)"),
        ("draft_SK", torch.zeros(2, 4, dtype=torch.int32).T, r"strides \(1, 4\)"),
    ],
)
def test_what_does_not_fit_is_refused(option: str, value: Any, message: str):
    arguments, options = _good_arguments()
    verify_commit_publish(*arguments, **options)
    with pytest.raises(ValueError, match=message):
        verify_commit_publish(*arguments, **options | {option: value})
