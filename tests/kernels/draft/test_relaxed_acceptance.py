"""Relaxed acceptance: both twins against the specification's loop over sorted candidates.

On the CPU all agree to the bit. A GPU's exp differs from numpy's by some ulps, so there a draft
whose probability is within `TOLERANCE` of the threshold may pass or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.draft.relaxed_acceptance import (
    relaxed_acceptance,
    relaxed_acceptance_reference,
    relaxed_delta_prompt,
    relaxed_delta_prompt_reference,
    update_relaxed_delta,
    update_relaxed_delta_reference,
)
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import MAX_VOCABULARY
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes, gather_prefill

# Poisoned rows are nobody's business; in the interpreter numpy computes on them all the same.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")

INF, NAN = float("inf"), float("nan")
HUGE, LOWEST = 2**31 - 1, -(2**31)
TOLERANCE = 1e-6
BEGIN, END = (7, 8), (9,)


@dataclass(frozen=True)
class Twin:
    """One twin of the ops, and the device it runs on."""

    device: str
    reference: bool

    def ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def floats(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def params(
        self,
        slots: int,
        temperature: float = 0.0,
        stop_ids: Sequence[int] = (-1, -1),
        min_len: int = 0,
    ) -> SamplingTensors:
        """Parameters that are equal for every slot; what only other samplers read is poison."""
        return SamplingTensors.neutral(slots, device=self.device)._replace(
            temperature=torch.full((slots,), temperature, device=self.device),
            top_k=self.ints([HUGE] * slots),
            top_p=torch.full((slots,), NAN, device=self.device),
            min_p=torch.full((slots,), NAN, device=self.device),
            seed=torch.full((slots,), -1, dtype=torch.int64, device=self.device),
            stop_ids=self.ints(stop_ids).repeat(slots, 1),
            min_len=self.ints([min_len] * slots),
        )

    def accept(
        self,
        logits: torch.Tensor,
        token: Sequence[int],
        slot: Sequence[int],
        delta: torch.Tensor,
        params: SamplingTensors,
        *,
        topk: int,
        k: int,
        position: Sequence[int] | None = None,
    ) -> list[int]:
        op = relaxed_acceptance_reference if self.reference else relaxed_acceptance
        lanes = DecodeLanes(
            self.ints(token), self.ints(slot), self.ints(position or range(len(slot)))
        )
        relaxed = op(logits, lanes, delta, params, topk=topk, num_speculative_tokens=k)
        assert relaxed.dtype == torch.int32
        return relaxed.tolist()

    def accept_row(
        self,
        logits: Any,
        drafts: Sequence[int],
        delta: float,
        *,
        topk: int,
        **params: Any,
    ) -> list[int]:
        """Which drafts pass of the one live row, in slot 1 of three."""
        k = len(drafts)
        relaxed = self.accept(
            self.floats(logits),
            [HUGE, *drafts],
            [1] * (k + 1),
            self.floats([NAN, delta, NAN]),
            self.params(3, **params),
            topk=topk,
            k=k,
        )
        assert relaxed[-1] == 0, "past the last lane there is no draft"
        return relaxed[:-1]

    def update(self, *arguments: Any) -> None:
        (update_relaxed_delta_reference if self.reference else update_relaxed_delta)(*arguments)

    def prompt(self, *arguments: Any) -> None:
        (relaxed_delta_prompt_reference if self.reference else relaxed_delta_prompt)(*arguments)

    @property
    def exact(self) -> bool:
        return self.device == "cpu"


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin("cpu", reference=True)
    return Twin(request.getfixturevalue("device"), reference=False)


def probabilities(logits: Sequence[float]) -> list[np.float32]:
    """The float32 softmax, its total an exact Python integer."""
    row = np.array(logits, np.float32)
    mass = [np.exp(logit - row.max()) for logit in row]
    total = np.int64(sum(int(m * np.float32(2.0**40)) for m in mass)).astype(np.float32)
    return [m / (total / np.float32(2.0**40)) for m in mass]


def passing(p: Sequence[np.float32], draft: int, topk: int, delta: np.float32) -> bool:
    """One turn of the specification's loop: a scan over sorted candidates."""
    candidates = sorted(range(len(p)), key=lambda i: (-p[i], i))[:topk]
    threshold = p[candidates[0]] - delta
    for j, candidate in enumerate(candidates):
        if j > 0 and p[candidate] < threshold:
            break
        if candidate == draft:
            return True
    return False


def close_call(p: Sequence[np.float32], draft: int, delta: np.float32) -> bool:
    return abs(float(max(p)) - float(delta) - float(p[draft])) < TOLERANCE


# The specification's worked example: a..k are ids 0..8, topk 3.
WORKED = [[0.50, 0.30, 0.15], [0.60, 0.35, 0.04], [0.90, 0.06, 0.02], [1.0, 1.0, 1.0]]


def worked_logits() -> list[list[float]]:
    rows = []
    for number, row in enumerate(WORKED):
        rest = max(1.0 - sum(row), 1e-9) / 100
        p = [rest] * 12
        p[3 * number : 3 * number + 3] = row
        rows.append(np.log(p).tolist())
    return rows


@pytest.mark.parametrize(("delta", "passes"), [(0.3, [1, 1, 0]), (0.1, [0, 0, 0])])
def test_the_worked_example(twin: Twin, delta: float, passes: list[int]):
    """Drafts b, e, h: with 0.3 the output is b, e, g, with 0.1 it is a."""
    assert twin.accept_row(worked_logits(), [1, 4, 7], delta, topk=3) == passes


def test_earlier_lanes_do_not_matter(twin: Twin):
    """A draft passes on its own merit: `verify_commit_publish` takes the leading run."""
    assert twin.accept_row(worked_logits(), [8, 4, 6], 0.3, topk=3) == [0, 1, 1]


def test_delta_zero_leaves_the_argmax_and_exact_ties(twin: Twin):
    row = [1.0, 3.0, 2.5, 3.0, 3.0]
    for draft, passes in enumerate([0, 1, 0, 1, 1]):
        assert twin.accept_row([row] * 2, [draft], 0.0, topk=5) == [passes], draft


def test_ties_at_the_last_candidate_go_to_the_lower_id(twin: Twin):
    row = [0.0, 2.0, 1.0, 1.0, 3.0, 1.0]
    for topk, candidates in ((1, {4}), (2, {4, 1}), (3, {4, 1, 2}), (4, {4, 1, 2, 3})):
        for draft in range(6):
            expected = [int(draft in candidates)]
            assert twin.accept_row([row] * 2, [draft], 1.0, topk=topk) == expected, (topk, draft)


def test_more_candidates_than_ids(twin: Twin):
    assert twin.accept_row([[0.0, -INF]] * 3, [1, 0], 1.0, topk=1000) == [0, 1]
    assert twin.accept_row([[0.0, -300.0]] * 3, [1, 0], 1.0, topk=1000) == [1, 1]
    assert twin.accept_row([[0.0, -300.0]] * 3, [1, 0], 0.5, topk=1000) == [0, 1]
    assert twin.accept_row([[4.0]] * 2, [0], 0.0, topk=1) == [1]


def test_what_is_forbidden_never_passes(twin: Twin):
    """Fewer ids than candidates are allowed, and the threshold is 0 or less."""
    rows = [[-INF, 1.0, -INF, 0.5]] * 5
    for delta in (0.0, 0.7, 1.0):
        assert twin.accept_row(rows, [0, 1, 2, 0], delta, topk=4) == [0, 1, 0, 0]
    # The least of logits is improbable, but it is allowed.
    assert twin.accept_row([[500.0, -500.0, -INF]] * 3, [1, 2], 1.0, topk=3) == [1, 0]


@pytest.mark.parametrize(
    "row", [[NAN, 1.0, 2.0], [1.0, 2.0, NAN], [-INF] * 3, [INF, 1.0, 2.0], [NAN] * 3]
)
def test_nothing_passes_without_valid_logits(twin: Twin, row: list[float]):
    good = [1.0, 2.0, 3.0]
    for draft in range(3):
        assert twin.accept_row([row, good, good], [draft, 2], 1.0, topk=3) == [0, 1]


@pytest.mark.parametrize("draft", [-1, LOWEST, 3, HUGE])
def test_a_draft_outside_the_vocabulary_does_not_pass(twin: Twin, draft: int):
    assert twin.accept_row([[1.0, 2.0, 3.0]] * 3, [draft, 0], 1.0, topk=3) == [0, 1]


def test_a_forbidden_draft_does_not_pass(twin: Twin):
    """Among fewer allowed ids than there may be candidates, with a delta that lets any pass."""
    logits = [[-INF, 3.0, -INF, 1.0]] * 3
    assert twin.accept_row(logits, [3, 1], 1.0, topk=4) == [1, 1]
    assert twin.accept_row(logits, [2, 0], 1.0, topk=4) == [0, 0]
    # So improbable that nothing is left of it, but allowed.
    assert twin.accept_row([[-300.0, 3.0, -INF, 1.0]] * 3, [0, 2], 1.0, topk=4) == [1, 0]


@pytest.mark.parametrize("temperature", [1e-6, 1.0, NAN])
def test_rows_that_are_not_greedy_accept_nothing(twin: Twin, temperature: float):
    rows = [[1.0, 2.0, 3.0]] * 3
    assert twin.accept_row(rows, [2, 1], 1.0, topk=3, temperature=temperature) == [0, 0]


def test_a_stop_id_waits_for_min_len(twin: Twin):
    """Lane j's draft sits at position j + 1 here."""
    rows = [[1.0, 2.0, 3.0]] * 5
    waiting: dict[str, Any] = {"stop_ids": [2, -1], "min_len": 3}
    assert twin.accept_row(rows, [2, 2, 2, 2], 1.0, topk=3, **waiting) == [0, 0, 1, 1]
    assert twin.accept_row(rows, [1, 2, 0, 2], 1.0, topk=3, **waiting) == [1, 0, 1, 1]
    assert twin.accept_row(rows, [2, 2, 2, 2], 1.0, topk=3, stop_ids=[2], min_len=0) == [1] * 4
    assert twin.accept_row(rows, [2, 2, 2, 2], 1.0, topk=3, stop_ids=[], min_len=9) == [1] * 4


def test_padded_lanes_are_neither_judged_nor_read(twin: Twin):
    """W = 3: a whole row, a padded one, one with a draft less, one without drafts."""
    good, poison = [1.0, 2.0, 3.0], [NAN] * 3
    rows = [good, good, poison, *[poison] * 3, good, poison, poison, poison, good, poison]
    slot = [0, 0, 0, -1, -1, LOWEST, 2, 2, -1, 1, -1, -1]
    token = [HUGE, 2, 1, HUGE, 2, 2, HUGE, 0, 2, HUGE, 2, 2]
    delta = twin.floats([0.9, NAN, 0.9, NAN])
    position = [5, 6, 7, LOWEST, HUGE, 0, 1, 2, LOWEST, HUGE, 0, 0]
    relaxed = twin.accept(
        twin.floats(rows), token, slot, delta, twin.params(4), topk=3, k=2, position=position
    )
    assert relaxed == [1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert delta.isnan().tolist() == [False, True, False, True]


def test_no_drafts_and_no_lanes(twin: Twin):
    logits, delta = twin.floats([[1.0, 2.0]] * 3), twin.floats([1.0, 1.0, 1.0])
    params = twin.params(3)
    assert twin.accept(logits, [1] * 3, [0, 1, 2], delta, params, topk=2, k=0) == [0, 0, 0]
    assert twin.accept(logits[:0], [], [], delta, params, topk=2, k=3) == []


@pytest.mark.parametrize("vocabulary", [1, 5, 1023, 4096, 4097, 9001])
def test_probabilities_are_the_softmax(twin: Twin, vocabulary: int):
    """Thresholds just above and just below a draft's probability in float64; logits strided."""
    generator = torch.Generator().manual_seed(vocabulary)
    storage = torch.full((4, vocabulary + 3), NAN)
    storage[:, :vocabulary] = torch.randn(4, vocabulary, generator=generator) * 3
    logits = storage.to(twin.device)[:, :vocabulary]
    p = storage[:, :vocabulary].double().softmax(dim=1)
    drafts = torch.randint(vocabulary, (3,), generator=generator).tolist()
    for lane, draft in enumerate(drafts):
        gap = float(p[lane].max() - p[lane, draft])
        # The most probable id passes at any delta.
        for delta, expected in ((gap + TOLERANCE, 1), (gap - TOLERANCE, 0))[: 2 if gap > 0 else 1]:
            token = [HUGE, *drafts]
            params = twin.params(1)
            relaxed = twin.accept(
                logits, token, [0] * 4, twin.floats([delta]), params, topk=vocabulary, k=3
            )
            assert relaxed[lane] == expected, (lane, draft, delta)


@pytest.mark.parametrize("topk", [1, 2, 10, 500])
def test_ranks_count_over_all_tiles(twin: Twin, topk: int):
    """The draft of rank topk - 1 passes, that of rank topk does not, wherever they are."""
    generator = torch.Generator().manual_seed(topk)
    logits = (torch.randperm(5000, generator=generator) // 2).float()[None].repeat(3, 1) * 1e-3
    order = sorted(range(5000), key=lambda i: (-logits[0, i].item(), i))
    drafts = [order[topk - 1], order[topk]]
    assert twin.accept_row(logits.tolist(), drafts, 1.0, topk=topk) == [1, 0]


@settings(max_examples=extent(20, 60), deadline=None)
@given(data=st.data())
def test_rows_against_the_specifications_loop(twin: Twin, data: st.DataObject):
    """The leading run of a step and the target's token after it, for rows in any arrangement."""
    k = data.draw(st.integers(0, 4))
    slots, vocabulary = 4, data.draw(st.integers(1, 8))
    row_slots = data.draw(st.permutations(range(slots)))[: data.draw(st.integers(1, slots))]
    topk = data.draw(st.integers(1, 9))
    # A grid of logits: what is equal ties exactly, what is not is far apart.
    row = st.lists(st.integers(-8, 8), min_size=vocabulary, max_size=vocabulary)
    deltas = [data.draw(st.floats(0, 1, width=32)) for _ in range(slots)]
    logits, token, slot = [], [], []
    for row_slot in row_slots:
        drafts = data.draw(st.integers(-1, k), label="live drafts, -1 for a padded row")
        for j in range(k + 1):
            live = j <= drafts
            logits.append([0.25 * x for x in data.draw(row)] if live else [NAN] * vocabulary)
            token.append(data.draw(st.integers(0, vocabulary)) if live else HUGE)
            slot.append(row_slot if live else -1)
    relaxed = twin.accept(
        twin.floats(logits), token, slot, twin.floats(deltas), twin.params(slots), topk=topk, k=k
    )
    for lane, found in enumerate(relaxed):
        if lane % (k + 1) == k or slot[lane] < 0 or slot[lane + 1] < 0:
            assert found == 0
            continue
        draft, delta = token[lane + 1], np.float32(deltas[slot[lane]])
        p = probabilities(logits[lane])
        if twin.exact or draft >= vocabulary or not close_call(p, draft, delta):
            assert bool(found) == passing(p, draft, topk, delta), lane


def test_a_lane_keeps_its_bits_in_any_company(twin: Twin):
    """Thresholds at the very probability, where the last bit decides."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(12, 700, generator=generator)
    drafts = torch.randint(700, (12,), generator=generator).tolist()
    p = logits.softmax(dim=1)
    delta = p.amax(dim=1) - p[range(12), [drafts[-11 + lane] for lane in range(12)]]
    params, wide = twin.params(12), logits.to(twin.device)

    def judged(lane: int, k: int, row: int, rows: int) -> int:
        """Lane `lane` as the first of row `row`, among `rows` rows of K drafts."""
        count = rows * (k + 1)
        chosen = (torch.arange(count) * 5 + lane - row * (k + 1) * 5) % 12
        slot = [lane] * count
        token = [drafts[(lane + 1) % 12]] * count
        found = twin.accept(
            wide[chosen.to(twin.device)], token, slot, delta.to(twin.device), params, topk=700, k=k
        )
        return found[row * (k + 1)]

    for lane in range(0, 12, extent(4, 1)):
        alone = judged(lane, k=1, row=0, rows=1)
        assert judged(lane, k=3, row=2, rows=5) == alone
        assert judged(lane, k=7, row=6, rows=8) == alone


# The state, a delta a slot.


def plain_scan(tokens: Sequence[int], delta: float, relaxed_delta: float) -> float:
    for token in tokens:
        if token in BEGIN:
            delta = relaxed_delta
        if token in END:
            delta = 0.0
    return delta


def marks(twin: Twin) -> tuple[torch.Tensor, torch.Tensor]:
    return twin.ints(BEGIN), twin.ints(END)


@settings(max_examples=extent(20, 60), deadline=None)
@given(data=st.data())
def test_updates_against_a_plain_scan(twin: Twin, data: st.DataObject):
    width, slots = data.draw(st.integers(1, 5)), 5
    row_slots = data.draw(st.permutations([*range(slots), -1, LOWEST]))
    row_slots = row_slots[: data.draw(st.integers(1, 6))]
    deltas = [float(np.float32(data.draw(st.sampled_from([0.0, 0.25, 0.6])))) for _ in range(slots)]
    expected, tokens, counts, slot = list(deltas), [], [], []
    for row_slot in row_slots:
        count = data.draw(st.integers(0, width))
        row = [data.draw(st.sampled_from([0, 3, *BEGIN, *END])) for _ in range(width)]
        tokens += row
        counts.append(count if row_slot >= 0 else HUGE)
        # Lanes after the first may be padded: the tokens emitted are count's to tell.
        slot += [row_slot] + [data.draw(st.sampled_from([row_slot, -1]))] * (width - 1)
        if row_slot >= 0:
            expected[row_slot] = plain_scan(row[:count], expected[row_slot], 0.5)
    delta = twin.floats(deltas)
    garbage = twin.ints([HUGE] * len(slot))
    lanes = DecodeLanes(garbage, twin.ints(slot), garbage)
    twin.update(twin.ints(tokens), twin.ints(counts), lanes, delta, *marks(twin), 0.5)
    assert delta.tolist() == expected


@pytest.mark.parametrize(
    ("emitted", "count", "delta"),
    [
        ([7, 0, 0, 0], 4, 0.6),
        ([7, 9, 0, 0], 4, 0.0),
        ([9, 8, 0, 0], 4, 0.6),
        ([9, 8, 9, 7], 2, 0.6),
        ([9, 8, 9, 7], 3, 0.0),
        ([0, 0, 0, 7], 3, 0.25),
        ([7, 7, 7, 7], 0, 0.25),
        ([7, 7, 7, 9], 9, 0.0),
    ],
)
def test_the_last_mark_wins(twin: Twin, emitted: list[int], count: int, delta: float):
    state = twin.floats([NAN, 0.25])
    lanes = DecodeLanes(*(twin.ints([1] * 4) for _ in range(3)))
    twin.update(twin.ints(emitted), twin.ints([count]), lanes, state, *marks(twin), 0.6)
    assert state.isnan().tolist() == [True, False]
    assert state[1].item() == np.float32(delta)


def test_a_row_ends_where_the_next_begins(twin: Twin):
    """W = 3, in tiles of four: a count past the row's lanes is taken for all of them."""
    state = twin.floats([0.25, 0.25])
    lanes = DecodeLanes(*(twin.ints([0, 0, 0, 1, 1, 1]) for _ in range(3)))
    tokens, counts = twin.ints([0, 1, 2, 7, 0, 0]), twin.ints([HUGE, 1])
    twin.update(tokens, counts, lanes, state, *marks(twin), 0.5)
    assert state.tolist() == [0.25, 0.5]


def test_without_marks_nothing_changes(twin: Twin):
    state, none = twin.floats([0.25]), twin.ints([])
    lanes = DecodeLanes(*(twin.ints([0, 0]) for _ in range(3)))
    twin.update(twin.ints([7, 9]), twin.ints([2]), lanes, state, none, none, 0.6)
    assert state.tolist() == [0.25]
    # Of an id that both begins and ends a phase the end counts.
    twin.update(
        twin.ints([7, 7]), twin.ints([2]), lanes, state, twin.ints([7]), twin.ints([7]), 1.0
    )
    assert state.tolist() == [0.0]
    empty = DecodeLanes(none, none, none)
    twin.update(none, none, empty, state, *marks(twin), 0.6)


def feed(
    twin: Twin,
    state: torch.Tensor,
    chunk: Sequence[int],
    *,
    slot: int = 1,
    start: int = 0,
    count: int | None = None,
    final: bool = False,
    sampled: int = HUGE,
    size: int = 16,
) -> None:
    """One chunk in a bucket of `size` tokens; after it, and after the bucket, lie marks."""
    tokens = twin.ints([*chunk, *[BEGIN[0]] * (size + 8 - len(chunk))])[:size]
    fields = (slot, start, len(chunk) if count is None else count)
    lanes = gather_prefill(tokens, *(twin.ints([field]) for field in fields))
    twin.prompt(lanes, twin.ints([sampled]), twin.ints([int(final)]), state, *marks(twin), 0.5)


@settings(max_examples=extent(10, 40), deadline=None)
@given(data=st.data())
def test_chunks_of_several_prompts_leave_what_each_would_alone(twin: Twin, data: st.DataObject):
    """In any slots, with a padded chunk among them, and with marks past them."""
    token = st.sampled_from([0, 1, *BEGIN, *END])
    chunks = data.draw(st.lists(st.lists(token, min_size=1, max_size=6), min_size=2, max_size=3))
    starts = [data.draw(st.sampled_from([0, 4])) for _ in chunks]
    final = [data.draw(st.booleans()) for _ in chunks]
    sampled = [data.draw(token) for _ in chunks]
    slots = data.draw(st.permutations(range(4)))[: len(chunks)]
    before = [0.25, 0.5, 0.75, 0.125]
    together, alone = twin.floats(before), twin.floats(before)
    for place, chunk in enumerate(chunks):
        more = {"final": final[place], "sampled": sampled[place], "start": starts[place]}
        feed(twin, alone, chunk, slot=slots[place], **more)
    fed = [*chain(*chunks), *BEGIN, *END]
    fields = ([*slots, -1], [*starts, 0], [*map(len, chunks), 2])
    lanes = gather_prefill(twin.ints(fed), *map(twin.ints, fields))
    ends = twin.ints([*sampled, BEGIN[0]]), twin.ints([*map(int, final), 1])
    twin.prompt(lanes, *ends, together, *marks(twin), 0.5)
    assert together.tolist() == alone.tolist()


@settings(max_examples=extent(20, 60), deadline=None)
@given(data=st.data())
def test_chunks_leave_what_the_whole_prompt_would(twin: Twin, data: st.DataObject):
    token = st.sampled_from([0, 1, 2, *BEGIN, *END])
    prompt = data.draw(st.lists(token, min_size=1, max_size=30))
    sampled = data.draw(st.sampled_from([-1, 0, *BEGIN, *END]))
    state = twin.floats([NAN, data.draw(st.sampled_from([0.0, 0.5, 0.75])), NAN])
    start = 0
    while start < len(prompt):
        end = min(start + data.draw(st.integers(1, 16)), len(prompt))
        final = end == len(prompt)
        # Before the final chunk the sampled token means nothing.
        feed(
            twin,
            state,
            prompt[start:end],
            start=start,
            final=final,
            sampled=sampled if final else data.draw(token),
        )
        start = end
        assert state.isnan().tolist() == [True, False, True]
        scanned = [*prompt[:end], *([sampled] if final else [])]
        assert state[1].item() == plain_scan(scanned, 0.0, 0.5)


def test_a_chunk_that_is_none_changes_nothing(twin: Twin):
    state = twin.floats([0.25, 0.75])
    feed(twin, state, [7, 9, 7], slot=-1, final=True, sampled=7)
    feed(twin, state, [7, 9, 7], count=0, final=True, sampled=7)
    feed(twin, state, [7, 9, 7], count=-1, final=True, sampled=7)
    assert state.tolist() == [0.25, 0.75]


def test_a_count_past_the_bucket_is_the_buckets(twin: Twin):
    state = twin.floats([0.25, 0.75])
    feed(twin, state, [0, 0, 9], start=4, count=HUGE, size=3)
    assert state.tolist() == [0.25, 0.0]
    feed(twin, state, [0, 0, 7], start=4, count=2, size=3)
    assert state.tolist() == [0.25, 0.0]


def test_a_new_request_starts_without_a_delta(twin: Twin):
    state = twin.floats([0.25, 0.75])
    feed(twin, state, [1, 2])
    assert state.tolist() == [0.25, 0.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
@pytest.mark.parametrize("pdl", [False, True])
def test_a_captured_step_follows_its_buffers(pdl: bool):
    twin = Twin("cuda", reference=False)
    logits, delta = twin.floats([[1.0, 2.0, 3.0, 0.0]] * 4), twin.floats([0.0])
    params = twin.params(1)
    lanes = DecodeLanes(twin.ints([0, 1, 2, 0]), twin.ints([0] * 4), twin.ints([0, 1, 2, 3]))
    token, count = twin.ints([1, 7, 0, 0]), twin.ints([0])
    between = twin.ints([0])
    begin, end = marks(twin)

    def step() -> torch.Tensor:
        between.add_(1)
        relaxed = relaxed_acceptance(
            logits, lanes, delta, params, topk=3, num_speculative_tokens=3, pdl=pdl
        )
        between.add_(1)
        update_relaxed_delta(token, count, lanes, delta, begin, end, 0.75, pdl=pdl)
        between.add_(1)
        return relaxed

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        relaxed = step()
    graph.replay()
    torch.cuda.synchronize()
    assert (relaxed.tolist(), delta.tolist()) == ([0, 1, 0, 0], [0.0])
    count.fill_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert (relaxed.tolist(), delta.tolist()) == ([0, 1, 0, 0], [0.75])
    graph.replay()
    torch.cuda.synchronize()
    assert relaxed.tolist() == [1, 1, 1, 0]


# What is refused.


def good_acceptance(**changes: Any) -> dict[str, Any]:
    twin = Twin("cpu", reference=False)
    good: dict[str, Any] = {
        "logits_NV": twin.floats([[1.0, 2.0]] * 4),
        "lanes": DecodeLanes(*(twin.ints([0, 0, 1, 1]) for _ in range(3))),
        "delta_S": twin.floats([0.0] * 3),
        "params": twin.params(3),
        "topk": 2,
        "num_speculative_tokens": 1,
    }
    return good | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits_NV": torch.zeros(4)}, r"logits must be float32 \[N, V\] with dense rows, not"),
        ({"logits_NV": torch.zeros(4, 2).half()}, r"logits must be .* not torch.float16 \(4, 2\)"),
        ({"logits_NV": torch.zeros(2, 4).t()}, r"logits must be .* with strides \(1, 4\)"),
        ({"logits_NV": torch.zeros(4, 0)}, rf"vocabulary of 0 is outside 1 \.\. {MAX_VOCABULARY}"),
        (
            {"logits_NV": torch.zeros(1, MAX_VOCABULARY + 1).expand(4, -1)},
            rf"vocabulary of {MAX_VOCABULARY + 1} is outside 1 \.\. {MAX_VOCABULARY}",
        ),
        ({"topk": 0}, r"topk=0 must be at least 1"),
        ({"topk": -3}, r"topk=-3 must be at least 1"),
        ({"num_speculative_tokens": 2}, r"4 lanes are no rows of num_speculative_tokens=2 \+ 1"),
        ({"num_speculative_tokens": -1}, r"4 lanes are no rows of num_speculative_tokens=-1 \+ 1"),
        ({"logits_NV": torch.zeros(2, 2)}, r"token must be a dense \[2\], not \(4,\)"),
        ({"delta_S": torch.zeros(4)}, r"delta must be a dense torch.float32 \[3\], not .* \(4,\)"),
        ({"delta_S": torch.zeros(3).double()}, r"delta must be .* not torch.float64 \(3,\)"),
    ],
)
def test_wrong_arguments_of_the_acceptance_are_refused(changes: dict[str, Any], message: str):
    relaxed_acceptance(**good_acceptance())
    with pytest.raises(ValueError, match=message):
        relaxed_acceptance(**good_acceptance(**changes))


@pytest.mark.parametrize("field", ["token", "slot", "position"])
def test_lanes_must_be_int32(field: str):
    lanes = good_acceptance()["lanes"]
    wrong = lanes._replace(**{field: getattr(lanes, field).long()})
    with pytest.raises(ValueError, match=rf"{field} must be int32, not torch.int64"):
        relaxed_acceptance(**good_acceptance(lanes=wrong))


@pytest.mark.parametrize("field", ["temperature", "stop_ids", "min_len"])
def test_parameters_must_fit(field: str):
    params = good_acceptance()["params"]
    wrong = params._replace(**{field: getattr(params, field).double()})
    with pytest.raises(ValueError, match=rf"{field} must be"):
        relaxed_acceptance(**good_acceptance(params=wrong))


def good_update(**changes: Any) -> dict[str, Any]:
    twin = Twin("cpu", reference=False)
    good: dict[str, Any] = {
        "token_N": twin.ints([0] * 4),
        "count_R": twin.ints([1, 2]),
        "lanes": DecodeLanes(*(twin.ints([0, 0, 1, 1]) for _ in range(3))),
        "delta_S": twin.floats([0.0] * 3),
        "begin_ids": twin.ints(BEGIN),
        "end_ids": twin.ints(END),
        "relaxed_delta": 0.5,
    }
    return good | changes


def zeros(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype)


MARK_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"delta_S": zeros(3)}, r"delta must be a dense torch.float32 \[3\], not torch.int32 \(3,\)"),
    ({"begin_ids": zeros(2, torch.int64)}, r"begin_ids must be int32, not torch.int64"),
    ({"end_ids": zeros(2, torch.int64)}, r"end_ids must be int32, not torch.int64"),
    ({"begin_ids": zeros(2)[None]}, r"begin_ids must be a dense vector, not \(1, 2\)"),
    ({"end_ids": zeros(4)[::2]}, r"end_ids must be a dense vector, not \(2,\)"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_N": zeros(4, torch.int64)}, r"token must be int32, not torch.int64"),
        ({"token_N": zeros(3)}, r"slot must be a dense \[3\], not \(4,\)"),
        ({"count_R": zeros(2, torch.int64)}, r"count must be int32, not torch.int64"),
        ({"count_R": zeros(3)}, r"4 lanes are no rows of one width: there are 3 rows"),
        ({"count_R": zeros(0)}, r"4 lanes are no rows of one width: there are 0 rows"),
        *MARK_ERRORS,
    ],
)
def test_wrong_arguments_of_the_update_are_refused(changes: dict[str, Any], message: str):
    update_relaxed_delta(**good_update())
    with pytest.raises(ValueError, match=message):
        update_relaxed_delta(**good_update(**changes))


def good_prompt() -> dict[str, Any]:
    update = good_update()
    chunk = PrefillLanes(zeros(8), zeros(8), zeros(8), zeros(2), zeros(1))
    good: dict[str, Any] = {"chunk": chunk, "token_C": zeros(1), "final_C": zeros(1)}
    for name in ("delta_S", "begin_ids", "end_ids", "relaxed_delta"):
        good[name] = update[name]
    return good


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token": zeros(8, torch.int64)}, r"token must be int32, not torch.int64"),
        ({"slot": zeros(7)}, r"token must be a dense \[7\], not \(8,\)"),
        ({"position": zeros(7)}, r"position must be a dense \[8\], not \(7,\)"),
        ({"query_start": zeros(3)}, r"query_start must be a dense \[2\], not \(3,\)"),
        ({"token_C": zeros(2)}, r"sampled must be a dense \[1\], not \(2,\)"),
        ({"final_C": zeros(1).float()}, r"final must be int32, not torch.float32"),
        *MARK_ERRORS,
    ],
)
def test_wrong_arguments_of_the_prompt_are_refused(changes: dict[str, Any], message: str):
    good = good_prompt()
    relaxed_delta_prompt(**good)
    if changes.keys() <= {*PrefillLanes._fields}:
        changes = {"chunk": good["chunk"]._replace(**changes)}
    with pytest.raises(ValueError, match=message):
        relaxed_delta_prompt(**good | changes)
