"""What a request has said, noted on the device, against Python lists and counters."""

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
from graphengine.kernels.logits.logits_triton import COUNT_MASK
from graphengine.kernels.step import noted as module
from graphengine.kernels.step.noted import (
    note_prompt,
    note_prompt_reference,
    note_tokens,
    note_tokens_reference,
)
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)

HUGE, LOWEST = 2**31 - 1, -(2**31)
UNTOUCHED = -7
SLOTS = 4


@dataclass(frozen=True)
class Twin:
    tokens: Callable[..., None]
    prompt: Callable[..., None]
    device: str

    def ints(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def table(self, columns: int, value: int) -> torch.Tensor:
        """Rows that are not dense, of which the rest must stay."""
        wide = torch.full((SLOTS, columns + 3), value, dtype=torch.int32, device=self.device)
        return wide[:, :columns]

    def chunk(self, slot: int, start: int, tokens: Sequence[int], bucket: int) -> PrefillLanes:
        """Padded lanes are poison."""
        padded = bucket - len(tokens)
        return PrefillLanes(
            token=self.ints([*tokens, *[HUGE] * padded]),
            slot=self.ints([slot] * len(tokens) + [-1] * padded),
            position=self.ints([*range(start, start + len(tokens)), *[LOWEST] * padded]),
            query_start=self.ints([0, len(tokens)]),
            last=self.ints([max(len(tokens) - 1, 0)]),
        )


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin(note_tokens_reference, note_prompt_reference, "cpu")
    return Twin(note_tokens, note_prompt, request.getfixturevalue("device"))


class Notes:
    """What the tables should hold: of every slot its prompt's ids, its output and all it said."""

    def __init__(self, twin: Twin, vocabulary: int, positions: int) -> None:
        self.vocabulary, self.positions = vocabulary, positions
        self.counts, self.history = twin.table(vocabulary, HUGE), twin.table(positions, UNTOUCHED)
        self.expected_counts = [[HUGE] * vocabulary for _ in range(SLOTS)]
        self.expected_history = [[UNTOUCHED] * positions for _ in range(SLOTS)]

    def put(self, slot: int, start: int, tokens: Sequence[int], prompt: bool) -> None:
        counts = self.expected_counts[slot]
        if prompt and start == 0:
            counts[:] = [0] * self.vocabulary
        for position, token in enumerate(tokens, start):
            if 0 <= token < self.vocabulary:
                said = counts[token] & COUNT_MASK
                counts[token] = LOWEST | said if prompt else counts[token] + 1
            if position < self.positions:
                self.expected_history[slot][position] = token

    def check(self) -> None:
        assert self.counts.tolist() == self.expected_counts
        assert self.history.tolist() == self.expected_history
        for table, value in ((self.counts, HUGE), (self.history, UNTOUCHED)):
            wide = torch.as_strided(table, (SLOTS, table.stride(0)), (table.stride(0), 1))
            assert (wide[:, table.shape[1] :] == value).all()


@settings(deadline=None, max_examples=extent(13, 40), derandomize=True)
@given(data=st.data())
def test_requests_from_prompt_to_end(twin: Twin, data: st.DataObject):
    """Prompts in chunks, steps of several rows of which some are padded, slots used again."""
    vocabulary = data.draw(st.sampled_from([1, 3, 33, 100]))
    positions, W = data.draw(st.sampled_from([12, 40])), data.draw(st.integers(1, 4))
    # Few ids, so that they meet again; some are past the vocabulary.
    token = st.sampled_from([0, 0, 1, 2, vocabulary - 1, vocabulary])
    notes = Notes(twin, vocabulary, positions)
    lengths: dict[int, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_V", data.draw(st.sampled_from([16, 64, 2048])))
        patch.setattr(module, "_BLOCK_T", data.draw(st.sampled_from([4, 8, 1024])))
        for _ in range(data.draw(st.integers(1, 5))):
            slot = data.draw(st.integers(0, SLOTS - 1))
            prompt = data.draw(st.lists(token, min_size=1, max_size=16))
            for start in range(0, len(prompt), 7):
                part = prompt[start : start + 7]
                chunk = twin.chunk(slot, start, part, data.draw(st.sampled_from([7, 9])))
                twin.prompt(chunk, notes.counts, notes.history)
                notes.put(slot, start, part, prompt=True)
            notes.check()
            lengths[slot] = len(prompt)

            rows = [data.draw(st.sampled_from([s, s, -1])) for s in lengths]
            emitted: list[int] = []
            counts: list[int] = []
            lanes: tuple[list[int], ...] = ([], [], [])
            for row in rows:
                new = data.draw(st.lists(token, max_size=W)) if row >= 0 else []
                at = lengths[row] - 1 if row >= 0 else LOWEST
                emitted += [*new, *[0] * (W - len(new))]
                counts.append(len(new) if row >= 0 else HUGE)
                for field, value in zip(lanes, (HUGE, row, at), strict=True):
                    field += [value, *[value if field is lanes[1] else HUGE] * (W - 1)]
                if row >= 0:
                    notes.put(row, lengths[row], new, prompt=False)
                    lengths[row] += len(new)
            twin.tokens(
                twin.ints(emitted),
                twin.ints(counts),
                DecodeLanes(*map(twin.ints, lanes)),
                notes.counts,
                notes.history,
            )
            notes.check()


def test_a_long_chunk_over_several_tiles(twin: Twin):
    vocabulary, T = 5000, 2500
    notes = Notes(twin, vocabulary, 4000)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (T,), generator=generator).tolist()
    for start in (0, T):
        twin.prompt(twin.chunk(1, start, tokens, T + 20), notes.counts, notes.history)
        notes.put(1, start, tokens, prompt=True)
    notes.check()


def test_a_token_emitted_twice_counts_twice(twin: Twin):
    notes = Notes(twin, 4, 9)
    twin.prompt(twin.chunk(2, 0, [3, 3], 2), notes.counts, notes.history)
    lanes = DecodeLanes(*(twin.ints([value] * 4) for value in (HUGE, 2, 1)))
    twin.tokens(twin.ints([3, 1, 3, 0]), twin.ints([3]), lanes, notes.counts, notes.history)
    assert notes.counts[2].tolist() == [0, 1, 0, LOWEST + 2]
    assert notes.history[2].tolist() == [3, 3, 3, 1, 3, *[UNTOUCHED] * 4]


def test_a_prompt_after_an_output_keeps_its_counts(twin: Twin):
    """A chunk that does not begin at 0 only adds marks."""
    notes = Notes(twin, 5, 9)
    twin.prompt(twin.chunk(1, 0, [0], 3), notes.counts, notes.history)
    lanes = DecodeLanes(*(twin.ints([value] * 2) for value in (HUGE, 1, 0)))
    twin.tokens(twin.ints([4, 4]), twin.ints([2]), lanes, notes.counts, notes.history)
    twin.prompt(twin.chunk(1, 3, [4, 2, 4], 3), notes.counts, notes.history)
    assert notes.counts[1].tolist() == [LOWEST, 0, LOWEST, 0, LOWEST + 2]
    assert notes.history[1].tolist() == [0, 4, 4, 4, 2, 4, *[UNTOUCHED] * 3]


def test_nothing_of_an_empty_chunk(twin: Twin):
    notes = Notes(twin, 5, 9)
    twin.prompt(twin.chunk(2, 0, [], 4), notes.counts, notes.history)
    notes.check()


@pytest.mark.parametrize("prompt", [False, True])
def test_what_does_not_fit(prompt: bool):
    twin = Twin(note_tokens, note_prompt, "cpu")
    good: dict[str, Any] = {
        "counts_SV": torch.zeros(SLOTS, 5, dtype=torch.int32),
        "history_SP": torch.zeros(SLOTS, 9, dtype=torch.int32),
    }
    op: Callable[..., None] = note_prompt if prompt else note_tokens
    if prompt:
        good["chunk"] = twin.chunk(0, 0, [1], 2)
    else:
        lanes = DecodeLanes(*(twin.ints([0, 0]) for _ in range(3)))
        good |= {"token_N": twin.ints([1, 1]), "count_R": twin.ints([1]), "lanes": lanes}
    op(**good)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"counts_SV": good["counts_SV"].long()}, r"counts must be int32 .* not torch.int64"),
        ({"counts_SV": good["counts_SV"].t()}, r"counts must be int32 \[5, 1 or more\] with dense"),
        ({"history_SP": good["history_SP"][:3]}, r"history must be int32 \[4, .* \(3, 9\)"),
    ]
    if prompt:
        short = good["chunk"]._replace(token=twin.ints([1]))
        wrong.append(({"chunk": short}, r"token must be a dense \[2\], not \(1,\)"))
    else:
        wrong.append(({"count_R": twin.ints([1] * 3)}, "2 lanes are no whole number of lanes"))
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            op(**good | change)


# What the PTX says.


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize("prompt", [False, True])
def test_tokens_are_read_after_the_wait(prompt: bool):
    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    tables = ints(4, 128_256), ints(4, 8192)

    def call() -> None:
        if prompt:
            chunk = PrefillLanes(ints(256), ints(256), ints(256), ints(2), ints(1))
            note_prompt(chunk, *tables, pdl=True)
        else:
            lanes = DecodeLanes(ints(8), ints(8), ints(8))
            note_tokens(ints(8), ints(2), lanes, *tables, pdl=True)

    launch = record_launch(module, call)
    assert launch.grid == ((63,) if prompt else (2,))
    ptx, names = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    early = {load for load in global_loads(ptx, names) if not load.after_wait}
    assert {load.argument for load in early} == (set() if prompt else {"slot_ptr", "position_ptr"})
    assert all(load.past_l1 for load in early)
    # Integers alone are added up by atomics.
    assert "atom.global.gpu.relaxed.add.f" not in ptx and "red.global.gpu.relaxed.add.f" not in ptx
