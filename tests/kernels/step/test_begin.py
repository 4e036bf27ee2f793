"""The first kernel of a decode step: commands, lanes and the embedded residual stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.step.begin import gather_and_embed, gather_and_embed_reference
from graphengine.kernels.step.state import DecodeLanes, SlotState

HUGE, LOWEST = 2**31 - 1, -(2**31)
# Exact in every dtype.
CANARY = 776.0
# More slots than one program resets.
SLOTS = 150
VOCABULARY = 2000
HIDDEN = 24


@dataclass(frozen=True)
class Twin:
    begin: Callable[..., DecodeLanes]
    device: str

    def ints(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def state(self, slots: int = SLOTS) -> SlotState:
        """Slot i holds token 1000 + i at position 2000 + i and runs."""
        number = torch.arange(slots, dtype=torch.int32, device=self.device)
        return SlotState(
            next_token=1000 + number,
            kv_len=2000 + number,
            running=torch.ones_like(number),
            epoch=torch.zeros_like(number),
            sequence=torch.tensor([5], device=self.device),
        )

    def table(
        self, vocabulary: int = VOCABULARY, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """An embedding and the weight of a norm."""
        draw = torch.Generator().manual_seed(hidden)
        embedding = torch.randn(vocabulary, hidden, generator=draw)
        weight = torch.randn(hidden, generator=draw)
        return embedding.to(self.device, dtype), weight.to(self.device, dtype)

    def residual(
        self, rows: int, hidden: int = HIDDEN, groups: int = 3, dtype: torch.dtype = torch.float32
    ) -> Residual:
        """Full of canaries, its rows far apart."""
        wide = torch.full((2, rows, hidden + 5), CANARY, device=self.device)
        return Residual(
            x=wide[0, :, :hidden],
            scaled=wide[1].to(dtype)[:, :hidden],
            squares=torch.full((groups, rows), CANARY, device=self.device),
        )


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin(gather_and_embed_reference, "cpu")
    return Twin(gather_and_embed, request.getfixturevalue("device"))


def check_residual(
    residual: Residual, tokens: Sequence[int | None], embedding: torch.Tensor, weight: torch.Tensor
) -> None:
    """The stream of these tokens, None for a padded lane, whose canaries must be whole."""
    for lane, token in enumerate(tokens):
        x, scaled = residual.x[lane].cpu(), residual.scaled[lane].cpu()
        squares = residual.squares[:, lane].cpu()
        if token is None:
            for tensor in (x, scaled, squares):
                assert (tensor == CANARY).all()
            continue
        hidden, groups = x.numel(), squares.numel()
        row = torch.full((hidden,), torch.nan)
        if 0 <= token < embedding.shape[0]:
            row = embedding[token].cpu().float()
        product = (row * weight.cpu().float()).to(scaled.dtype)
        torch.testing.assert_close(x, row, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(scaled, product, rtol=0, atol=0, equal_nan=True)
        expected = torch.zeros(groups, dtype=torch.float64)
        expected[0] = (row.double() ** 2).sum()
        torch.testing.assert_close(squares.double(), expected, rtol=1e-5, atol=0, equal_nan=True)
    beyond = residual.x.as_strided((len(tokens), 5), (residual.x.stride(0), 1), residual.x.shape[1])
    assert (beyond == CANARY).all(), "something was written between the rows"


def test_running_slots_alone_are_live(twin: Twin):
    state = twin.state()
    state.running[1::2] = 0
    command = twin.ints([0] * SLOTS)
    slot_of_row = [4, -1, 3, 148, HUGE, 0, LOWEST, SLOTS, *range(6, 106, 2)]
    expected = [4, -1, -1, 148, -1, 0, -1, -1, *range(6, 106, 2)]
    before = [tensor.clone() for tensor in state]
    residual = twin.residual(len(expected))

    lanes = twin.begin(state, command, twin.ints(slot_of_row), *twin.table(), residual)
    assert lanes.slot.tolist() == expected
    for row, slot in enumerate(expected):
        if slot >= 0:
            assert lanes.token[row].item() == 1000 + slot
            assert lanes.position[row].item() == 2000 + slot
    check_residual(
        residual, [1000 + slot if slot >= 0 else None for slot in expected], *twin.table()
    )
    assert all(map(torch.equal, before, state)), "without a command no state is written"


def test_a_command_is_applied_once_with_or_without_a_row(twin: Twin):
    state = twin.state()
    command = [0] * SLOTS
    for slot, epoch in {7: 3, 9: -1, 100: HUGE, 149: LOWEST}.items():
        command[slot] = epoch
    # Two of them have a row, one of these after other rows; of slots out of range none is reset.
    rows = [9, 8, 149, -1, HUGE]
    residual = twin.residual(len(rows))
    lanes = twin.begin(state, twin.ints(command), twin.ints(rows), *twin.table(), residual)

    assert lanes.slot.tolist() == [-1, 8, -1, -1, -1], "a slot that starts has no query"
    check_residual(residual, [None, 1008, None, None, None], *twin.table())
    assert state.epoch.tolist() == command
    for field, first in ((state.kv_len, 2000), (state.running, 1), (state.next_token, 1000)):
        step = int(first > 1)
        expected = [first + step * slot for slot in range(SLOTS)]
        for slot in (7, 9, 100, 149):
            expected[slot] = 0
        assert field.tolist() == expected
    assert state.sequence.tolist() == [5]

    # The prompt of slot 9 came in: the command that is still there does not start it again.
    state.running[9], state.kv_len[9], state.next_token[9] = 1, 11, 1234
    lanes = twin.begin(state, twin.ints(command), twin.ints(rows), *twin.table(), residual)
    assert lanes.slot.tolist() == [9, 8, -1, -1, -1]
    assert (lanes.token[0].item(), lanes.position[0].item()) == (1234, 11)
    assert state.kv_len[9].item() == 11
    check_residual(residual, [1234, 1008, None, None, None], *twin.table())


def test_tokens_outside_the_table_become_nan(twin: Twin):
    state = twin.state(6)
    tokens = [VOCABULARY, -1, HUGE, LOWEST, 0, VOCABULARY - 1]
    state.next_token.copy_(twin.ints(tokens))
    residual = twin.residual(6)
    rows = twin.ints(range(6))
    lanes = twin.begin(state, twin.ints([0] * 6), rows, *twin.table(), residual)
    assert lanes.slot.tolist() == [*range(6)]
    check_residual(residual, tokens, *twin.table())


@given(data=st.data())
@settings(max_examples=extent(13, 40), deadline=None, derandomize=True)
def test_matches_plain_python(twin: Twin, dtypes: tuple[torch.dtype, ...], data: st.DataObject):
    slots = data.draw(st.sampled_from([1, 2, 5, 64, 70]))
    hidden = data.draw(st.sampled_from([1, 16, 100, 1024]))
    dtype = data.draw(st.sampled_from(dtypes))
    groups = data.draw(st.integers(1, 5))
    numbers = data.draw(st.permutations(range(slots)))
    padding = st.sampled_from([-1, LOWEST, HUGE, slots])
    rows = data.draw(st.permutations([*numbers[: data.draw(st.integers(0, min(slots, 9)))], -1]))
    rows = [row if row >= 0 else data.draw(padding) for row in rows]

    state = twin.state(slots)
    running = data.draw(st.lists(st.integers(0, 1), min_size=slots, max_size=slots))
    state.running.copy_(twin.ints(running))
    pending = data.draw(st.sets(st.integers(0, slots - 1), max_size=4))
    command = [int(slot in pending) for slot in range(slots)]
    embedding, weight = twin.table(1100, hidden, dtype)
    residual = twin.residual(len(rows), hidden, groups, dtype)
    lanes = twin.begin(state, twin.ints(command), twin.ints(rows), embedding, weight, residual)
    live = [0 <= slot < slots and running[slot] and slot not in pending for slot in rows]
    assert lanes.slot.tolist() == [
        slot if is_live else -1 for slot, is_live in zip(rows, live, strict=True)
    ]
    tokens = [1000 + slot if is_live else None for slot, is_live in zip(rows, live, strict=True)]
    for row, token in enumerate(tokens):
        if token is not None:
            assert lanes.token[row].item() == token
            assert lanes.position[row].item() == token + 1000
    check_residual(residual, tokens, embedding, weight)
    kept = [slot not in pending for slot in range(slots)]
    assert state.kv_len.tolist() == [(2000 + slot) * kept[slot] for slot in range(slots)]
    assert state.next_token.tolist() == [(1000 + slot) * kept[slot] for slot in range(slots)]
    assert state.running.tolist() == [running[slot] * kept[slot] for slot in range(slots)]
    assert state.epoch.tolist() == command


def test_a_scale_is_that_of_the_embedding(twin: Twin, dtypes: tuple[torch.dtype, ...]):
    """The product is rounded before it is the stream."""
    for dtype in dtypes:
        embedding, weight = twin.table(1100, dtype=dtype)
        residual, command = twin.residual(2, dtype=dtype), twin.ints([0] * SLOTS)
        twin.begin(
            twin.state(), command, twin.ints([2, -1]), embedding, weight, residual,
            embedding_scale=6.5,
        )  # fmt: skip
        scaled = (embedding.float() * 6.5).to(dtype)
        check_residual(residual, [1002, None], scaled, weight)


def test_bits_of_a_row_do_not_depend_on_the_others(device: str):
    twin = Twin(gather_and_embed, device)
    hidden = 3000
    table = twin.table(1100, hidden)
    alone = twin.residual(1, hidden)
    command = twin.ints([0] * 64)
    twin.begin(twin.state(64), command, twin.ints([63]), *table, alone)
    many = twin.residual(64, hidden)
    rows = [*range(40), *[-1] * 23, 63]
    twin.begin(twin.state(64), command, twin.ints(rows), *table, many)
    for mine, others in zip(alone[:3], many[:3], strict=True):
        lane = -1 if others.shape[0] == 64 else (slice(None), -1)
        assert torch.equal(mine.flatten(), others[lane].flatten())


def test_tables_beyond_int32_offsets(device: str):
    if device != "cuda":
        pytest.skip("needs 4.5 GB on a GPU")
    twin = Twin(gather_and_embed, device)
    vocabulary, hidden = 2_200_000, 1024
    embedding = torch.empty(vocabulary, hidden, dtype=torch.bfloat16, device=device).normal_()
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    state, residual = twin.state(2), twin.residual(2, hidden, dtype=torch.bfloat16)
    state.next_token.copy_(twin.ints([vocabulary - 1, 0]))
    twin.begin(state, twin.ints([0, 0]), twin.ints([0, 1]), embedding, weight, residual)
    check_residual(residual, [vocabulary - 1, 0], embedding, weight)


# Rows of several tokens: the drafts after the query.


@given(data=st.data())
@settings(max_examples=extent(13, 40), deadline=None, derandomize=True)
def test_drafts_become_lanes(twin: Twin, dtypes: tuple[torch.dtype, ...], data: st.DataObject):
    drafts = data.draw(st.sampled_from([1, 2, 3, 5, 31]))
    columns = drafts + data.draw(st.sampled_from([0, 0, 1]))
    hidden = data.draw(st.sampled_from([1, 24, 100]))
    dtype = data.draw(st.sampled_from(dtypes))
    slots, width = 5, drafts + 1
    rows = data.draw(st.permutations([0, 1, 3, 4, -1, HUGE]))[: data.draw(st.integers(1, 6))]
    state = twin.state(slots)
    state.running[3], state.next_token[4] = data.draw(st.integers(0, 1)), -1
    command = [0, data.draw(st.integers(0, 1)), 0, 0, 0]
    room = data.draw(st.lists(st.integers(0, drafts + 2), min_size=slots, max_size=slots))
    max_len = [2000 + slot + 1 + room[slot] for slot in range(slots)]
    # Any number below 0 is an absent draft, also with others after it; some are in no table.
    draft = st.sampled_from([*[1, 5, 1099] * 5, -1, LOWEST, 1100, HUGE])
    table = data.draw(
        st.lists(st.lists(draft, min_size=columns, max_size=columns), min_size=5, max_size=5)
    )
    wide = torch.full((slots, columns + 2), HUGE, dtype=torch.int32, device=twin.device)
    wide[:, :columns] = twin.ints(table)
    before = wide.clone()
    embedding, weight = twin.table(1100, hidden, dtype)
    residual = twin.residual(len(rows) * width, hidden, 2, dtype)
    running, next_token = state.running.tolist(), state.next_token.tolist()

    lanes = twin.begin(
        *(state, twin.ints(command), twin.ints(rows), embedding, weight, residual),
        draft_SK=wide[:, :columns],
        max_len_S=twin.ints(max_len),
        num_speculative_tokens=drafts,
    )
    tokens: list[int | None] = []
    for r, slot in enumerate(rows):
        live = 0 <= slot < slots and running[slot] and not command[slot]
        for j in range(width):
            lane = r * width + j
            if live and j > 0:
                live = table[slot][j - 1] >= 0 and 2000 + slot + j + 1 < max_len[slot]
            assert lanes.slot[lane].item() == (slot if live else -1)
            tokens.append([next_token[slot], *table[slot]][j] if live else None)
            if live:
                assert lanes.token[lane].item() == tokens[-1]
                assert lanes.position[lane].item() == 2000 + slot + j
    check_residual(residual, tokens, embedding, weight)
    assert torch.equal(wide, before), "the table is read only"
    assert state.epoch.tolist() == command


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden", [24, 2048, 3000])
def test_bits_of_a_lane_do_not_depend_on_the_drafts(
    twin: Twin, dtypes: tuple[torch.dtype, ...], hidden: int, dtype: torch.dtype
):
    if dtype not in dtypes:
        pytest.skip("not computed by the interpreter")
    table = twin.table(1100, hidden, dtype)
    fed = torch.randint(0, 1100, (3, 15), dtype=torch.int32, device=twin.device)
    command, rows = twin.ints([0] * 3), twin.ints([2, 0, 1])
    for drafts in (0, 1, 3, 14):
        state, width = twin.state(3), drafts + 1
        state.next_token.copy_(fed[:, 0])
        many = twin.residual(3 * width, hidden, dtype=dtype)
        twin.begin(
            *(state, command, rows, *table, many),
            draft_SK=fed[:, 1:],
            max_len_S=twin.ints([HUGE] * 3),
            num_speculative_tokens=drafts,
        )
        for lane in range(3 * width):
            r, j = divmod(lane, width)
            one = twin.residual(1, hidden, dtype=dtype)
            slot = [2, 0, 1][r]
            state.next_token[slot] = fed[slot, j]
            twin.begin(state, command, twin.ints([slot]), *table, one)
            assert torch.equal(many.x[lane], one.x[0])
            assert torch.equal(many.scaled[lane], one.scaled[0])
            assert torch.equal(many.squares[:, lane], one.squares[:, 0])


def test_without_drafts_neither_table_is_read(twin: Twin):
    state, residual = twin.state(4), twin.residual(2)
    lanes = twin.begin(
        *(state, twin.ints([0] * 4), twin.ints([3, -1]), *twin.table(), residual),
        draft_SK=torch.full((4, 3), 1, dtype=torch.int32, device=twin.device),
        max_len_S=twin.ints([0] * 4),
    )
    assert lanes.slot.tolist() == [3, -1]
    check_residual(residual, [1003, None], *twin.table())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
@pytest.mark.parametrize("pdl", [False, True])
def test_a_captured_graph_follows_rows_and_commands(pdl: bool):
    twin = Twin(gather_and_embed, "cuda")
    state, residual, table = twin.state(4), twin.residual(3), twin.table()
    command, rows = twin.ints([0] * 4), twin.ints([-1] * 3)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gather_and_embed(state, command, rows, *table, residual, pdl=pdl)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        lanes = gather_and_embed(state, command, rows, *table, residual, pdl=pdl)
    rows.copy_(twin.ints([3, 0, 2]))
    command[2] = 1
    graph.replay()
    assert lanes.slot.tolist() == [3, 0, -1]
    assert state.kv_len.tolist() == [2000, 2001, 0, 2003]
    check_residual(residual, [1003, 1000, None], *table)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
@pytest.mark.parametrize("pdl", [False, True])
def test_a_captured_graph_follows_drafts(pdl: bool):
    twin = Twin(gather_and_embed, "cuda")
    state, residual, table = twin.state(4), twin.residual(6), twin.table()
    command, rows, max_len = twin.ints([0] * 4), twin.ints([3, -1]), twin.ints([HUGE] * 4)
    draft = torch.full((4, 2), -1, dtype=torch.int32, device="cuda")

    def step() -> DecodeLanes:
        return gather_and_embed(
            *(state, command, rows, *table, residual),
            draft_SK=draft,
            max_len_S=max_len,
            num_speculative_tokens=2,
            pdl=pdl,
        )

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        lanes = step()
    draft.copy_(twin.ints([9, 8, 7, 6, 5, 4, 3, 2]).view(4, 2))
    rows.copy_(twin.ints([1, 3]))
    max_len[3] = 2003 + 3
    graph.replay()
    assert lanes.slot.tolist() == [1, 1, 1, 3, 3, -1]
    assert lanes.token[:5].tolist() == [1001, 7, 6, 1003, 3]
    assert lanes.position[:5].tolist() == [2001, 2002, 2003, 2003, 2004]
    check_residual(residual, [1001, 7, 6, 1003, 3, None], *table)


def _good_arguments() -> list[Any]:
    twin = Twin(gather_and_embed, "cpu")
    command, rows = twin.ints([0] * 4), twin.ints([0, 1])
    return [twin.state(4), command, rows, *twin.table(), twin.residual(2)]


@pytest.mark.parametrize("number", range(6))
def test_wrong_dtypes_and_shapes_are_refused(number: int):
    arguments = _good_arguments()
    argument = arguments[number]
    wrong: list[Any] = []
    if isinstance(argument, torch.Tensor):
        wrong += [argument.to(torch.int16), argument[None, None], argument[..., None, None]]
    else:
        given = {name: each for name, each in argument._asdict().items() if each is not None}
        for name, tensor in given.items():
            wrong.append(argument._replace(**{name: tensor.to(torch.int16)}))
            wrong.append(argument._replace(**{name: tensor[None]}))
            wrong.append(argument._replace(**{name: tensor[..., :1].expand(*tensor.shape[:-1], 9)}))
    for value in wrong:
        with pytest.raises(ValueError, match=r"not"):
            gather_and_embed(*arguments[:number], value, *arguments[number + 1 :])


def test_a_residual_for_other_rows_is_refused():
    arguments = _good_arguments()
    twin = Twin(gather_and_embed, "cpu")
    for residual in (twin.residual(3), twin.residual(2, HIDDEN + 1), twin.residual(2, groups=0)):
        with pytest.raises(ValueError, match=r"must be"):
            gather_and_embed(*arguments[:5], residual)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("num_speculative_tokens", -1, r"num_speculative_tokens=-1, not 0\.\.31"),
        ("num_speculative_tokens", 32, r"num_speculative_tokens=32, not 0\.\.31"),
        ("num_speculative_tokens", 1, r"squares must be .* \[T, 4\]|out must be .* \[4, 24\]"),
        ("draft_SK", None, r"2 drafts a row want draft_SK and max_len_S"),
        ("max_len_S", None, r"2 drafts a row want draft_SK and max_len_S"),
        ("max_len_S", torch.zeros(4), r"max_len must be int32"),
        ("max_len_S", torch.zeros(3, dtype=torch.int32), r"max_len must be a dense \[4\]"),
        ("draft_SK", torch.zeros(4, 2), r"draft must be int32 \[4, 2 or more\].*float32"),
        ("draft_SK", torch.zeros(4, 1, dtype=torch.int32), r"\[4, 2 or more\].*\(4, 1\)"),
        ("draft_SK", torch.zeros(3, 2, dtype=torch.int32), r"\[4, 2 or more\].*\(3, 2\)"),
        ("draft_SK", torch.zeros(2, 4, dtype=torch.int32).T, r"strides \(1, 4\)"),
    ],
)
def test_drafts_that_do_not_fit_are_refused(option: str, value: Any, message: str):
    twin = Twin(gather_and_embed, "cpu")
    arguments = [*_good_arguments()[:5], twin.residual(6)]
    options: dict[str, Any] = {
        "draft_SK": torch.zeros(4, 3, dtype=torch.int32),
        "max_len_S": twin.ints([HUGE] * 4),
        "num_speculative_tokens": 2,
    }
    gather_and_embed(*arguments, **options)
    with pytest.raises(ValueError, match=message):
        gather_and_embed(*arguments, **options | {option: value})
