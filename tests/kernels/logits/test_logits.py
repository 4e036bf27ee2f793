"""Logits processing: both twins against plain loops, transformers and vLLM's formulae."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.logits import logits as module
from graphengine.kernels.logits.logits import (
    LogitsTensors,
    process_logits,
    process_logits_reference,
)
from graphengine.kernels.logits.logits_triton import (
    IN_PROMPT,
    USES_BAD_WORDS,
    USES_BIAS,
    USES_COUNTS,
    USES_GRAMMAR,
    USES_MASK,
    USES_REPETITION,
)
from graphengine.kernels.logits.logprobs import LogprobTensors
from graphengine.kernels.step.state import DecodeLanes
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)

# Broken rows are nobody's business; in the interpreter numpy computes on them all the same.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide):RuntimeWarning")

INF, NAN = float("inf"), float("nan")
HUGE, LOWEST = 2**31 - 1, -(2**31)
CANARY = 777.0


@dataclass
class Slot:
    """What one request asks for, and what it has said so far. None: not asked for."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    allowed: list[set[int]] | None = None
    bad_words: list[list[int]] | None = None
    bad_words_start: int = 0
    bias: dict[int, float] | None = None
    repetition: float | None = None
    frequency_presence: tuple[float, float] | None = None
    wanted: int = -1
    raw: bool = False

    @property
    def flags(self) -> int:
        return (
            (0 if self.allowed is None else USES_GRAMMAR if len(self.allowed) > 1 else USES_MASK)
            + USES_BAD_WORDS * (self.bad_words is not None)
            + USES_BIAS * (self.bias is not None)
            + USES_REPETITION * (self.repetition is not None)
            + USES_COUNTS * (self.frequency_presence is not None)
        )


def plain(
    row: Sequence[np.float32], slot: Slot, drafts: Sequence[int], j: int, vocabulary: int
) -> list[np.float32]:
    """The logits after draft j, by the module's docstring, one id after the other."""
    output = [*slot.output, *drafts[:j]]
    said = [*slot.prompt, *output]
    result = list(row)
    for i in range(len(row)):
        x = np.float32(row[i])
        if i >= vocabulary:
            result[i] = np.float32(-INF)
            continue
        broken = bool(np.isnan(x))
        if slot.allowed is not None and not broken:
            allowed = slot.allowed[j] if len(slot.allowed) > 1 else slot.allowed[0]
            x = x if i in allowed else np.float32(-INF)
        for *prefix, last in slot.bad_words or []:
            tail = said[slot.bad_words_start :][-len(prefix) :] if prefix else []
            if last == i and tail == prefix and not broken:
                x = np.float32(-INF)
        if slot.bias is not None:
            x = x + np.float32(slot.bias.get(i, 0.0))
        if slot.repetition is not None and i in said:
            r = np.float32(slot.repetition)
            x = x / r if x > 0 else x * r
        if slot.frequency_presence is not None:
            f, p = map(np.float32, slot.frequency_presence)
            x = x - f * np.float32(output.count(i))
            x = x - p * np.float32(i in output)
        result[i] = np.float32(x)
    return result


@dataclass(frozen=True)
class Twin:
    op: Callable[..., None]
    device: str

    def ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def floats(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def tensors(
        self,
        slots: Sequence[Slot | None],
        vocabulary: int,
        *,
        masks: int = 1,
        biases: int = 4,
        words: int = 3,
        length: int = 4,
        positions: int = 40,
    ) -> LogitsTensors:
        """The tables; whatever must not be read is poison, and so are whole slots of None."""
        S, words_V = len(slots), -(-vocabulary // 32)
        floats = {name: np.full(S, NAN, np.float32) for name in ("r", "p", "f")}
        flags, start = np.full(S, -1, np.int32), np.full(S, LOWEST, np.int32)
        bias_ids = np.tile(np.arange(biases, dtype=np.int32), (S, 1))
        bias_values = np.full((S, biases), NAN, np.float32)
        bitmask = np.zeros((S, masks, words_V), np.uint32)
        bad_words = np.full((S, words, length), 0, np.int32)
        counts = np.full((S, vocabulary + 3), HUGE, np.int32)
        history = np.full((S, positions + 2), HUGE, np.int32)
        for s, slot in enumerate(slots):
            if slot is None:
                continue
            flags[s] = slot.flags
            if slot.repetition is not None:
                floats["r"][s] = slot.repetition
            if slot.frequency_presence is not None:
                floats["f"][s], floats["p"][s] = slot.frequency_presence
            if slot.bias is not None:
                bias_ids[s] = -1
                # Free places are anywhere.
                places = np.random.default_rng(s).permutation(biases)[: len(slot.bias)]
                bias_ids[s, places] = list(slot.bias)
                bias_values[s, places] = list(slot.bias.values())
            for m, allowed in enumerate(slot.allowed or []):
                for i in allowed:
                    bitmask[s, m, i // 32] |= np.uint32(1 << i % 32)
            if slot.bad_words is not None:
                bad_words[s] = -1
                start[s] = slot.bad_words_start
                for q, word in enumerate(slot.bad_words):
                    bad_words[s, words - 1 - q, length - len(word) :] = word
            said = [*slot.prompt, *slot.output]
            history[s, : len(said)] = said
            counts[s, :vocabulary] = np.bincount(slot.output, minlength=vocabulary)[:vocabulary]
            counts[s, [i for i in slot.prompt if i < vocabulary]] |= np.int32(IN_PROMPT)
        return LogitsTensors(
            flags=self.ints(flags),
            repetition_penalty=self.floats(floats["r"]),
            presence_penalty=self.floats(floats["p"]),
            frequency_penalty=self.floats(floats["f"]),
            bias_ids=self.ints(bias_ids),
            bias_values=self.floats(bias_values),
            bitmask=self.ints(bitmask.view(np.int32)),
            bad_words=self.ints(bad_words),
            bad_words_start=self.ints(start),
            # Rows that are not dense, as of a table that is padded.
            counts=self.ints(counts)[:, :vocabulary],
            history=self.ints(history)[:, :positions],
        )

    def lanes(
        self, rows: Sequence[tuple[int, Sequence[int]]], slots: Sequence[Slot | None], K: int
    ) -> DecodeLanes:
        """Rows of (slot, drafts), padded after their drafts; slot -1 for a padded row."""
        columns: tuple[list[int], ...] = ([], [], [])
        for number, drafts in rows:
            for j in range(K + 1):
                values = (HUGE, -1, LOWEST)
                if number >= 0 and j <= len(drafts):
                    slot = slots[number]
                    assert slot is not None
                    said = [*slot.prompt, *slot.output]
                    values = ([said[-1], *drafts][j], number, len(said) - 1 + j)
                for column, value in zip(columns, values, strict=True):
                    column.append(value)
        return DecodeLanes(*map(self.ints, columns))

    def run(
        self,
        logits: np.ndarray,
        rows: Sequence[tuple[int, Sequence[int]]],
        slots: Sequence[Slot | None],
        K: int,
        *,
        vocabulary: int | None = None,
        stride: int = 0,
        copies: bool = False,
        **sizes: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The logits and what was copied of them, CANARY where nothing was."""
        N, V = logits.shape
        wide = torch.full((N, V + stride), CANARY, device=self.device)
        wide[:, :V] = self.floats(logits)
        raw = torch.full((N, V + 2 * stride), CANARY, device=self.device)
        tensors = self.tensors(slots, vocabulary or V, **sizes)
        before = [tensor.clone() for tensor in tensors]
        options: dict[str, Any] = {}
        if copies:
            wanted = [-1 if slot is None else slot.wanted for slot in slots]
            raws = [1 if slot is None else int(slot.raw) for slot in slots]
            options["raw_NV"] = raw[:, :V]
            options["wants"] = LogprobTensors(self.ints(wanted), self.ints(raws))
        self.op(
            wide[:, :V],
            self.lanes(rows, slots, K),
            tensors,
            num_speculative_tokens=K,
            vocabulary=vocabulary,
            **options,
        )
        assert (wide[:, V:] == CANARY).all() and (raw[:, V:] == CANARY).all()
        for name, old, new in zip(tensors._fields, before, tensors, strict=True):
            assert torch.equal(old.view(torch.int32), new.view(torch.int32)), f"{name} changed"
        return wide[:, :V].cpu().numpy(), raw[:, :V].cpu().numpy()

    def check(
        self,
        logits: np.ndarray,
        rows: Sequence[tuple[int, Sequence[int]]],
        slots: Sequence[Slot | None],
        K: int,
        **options: Any,
    ) -> None:
        """All lanes against the plain loop, bit for bit; padded ones against what they were."""
        vocabulary = options.get("vocabulary") or logits.shape[1]
        actual, raw = self.run(logits, rows, slots, K, **options)
        expected, expected_raw = logits.copy(), np.full_like(logits, CANARY)
        for r, (number, drafts) in enumerate(rows):
            for j in range(len(drafts) + 1 if number >= 0 else 0):
                slot, lane = slots[number], r * (K + 1) + j
                assert slot is not None
                expected[lane] = plain(logits[lane], slot, drafts, j, vocabulary)
                if options.get("copies") and slot.raw and slot.wanted >= 0:
                    expected_raw[lane, :vocabulary] = logits[lane, :vocabulary]
        np.testing.assert_array_equal(actual, expected)
        np.testing.assert_array_equal(raw, expected_raw)


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin(process_logits_reference, "cpu")
    return Twin(process_logits, request.getfixturevalue("device"))


FACTORS = st.sampled_from([1.0, 1.3, 0.7, 2.0])
PENALTIES = st.sampled_from([0.0, 0.3, -1.1, 2.0])


@st.composite
def slots_of(draw: st.DrawFn, vocabulary: int, masks: int) -> Slot:
    # Few ids, so that all of it meets; some are past the vocabulary.
    ids = st.integers(0, min(vocabulary, 4) + 1)
    inside = st.integers(0, vocabulary - 1)
    word = st.lists(ids, min_size=1, max_size=4)

    def maybe(strategy: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | strategy)

    prompt = draw(st.lists(ids, min_size=1, max_size=8))
    count = draw(st.sampled_from([1, masks]))
    return Slot(
        prompt=prompt,
        output=draw(st.lists(ids, max_size=8)),
        # One mask for all positions is repeated where there is room for many.
        allowed=maybe(st.lists(st.sets(inside | ids.map(lambda i: i % vocabulary)),
                               min_size=count, max_size=count).map(
                                   lambda sets: sets * (masks // count))),
        bad_words=maybe(st.lists(word, max_size=3)),
        bad_words_start=draw(st.sampled_from([0, len(prompt), 2])),
        bias=maybe(st.dictionaries(ids | inside, st.sampled_from([-INF, -9.5, 0.25, 3.0]),
                                   max_size=4)),
        repetition=maybe(FACTORS),
        frequency_presence=maybe(st.tuples(PENALTIES, PENALTIES)),
        wanted=draw(st.sampled_from([-1, 0, 3])),
        raw=draw(st.booleans()),
    )  # fmt: skip


@settings(deadline=None, max_examples=extent(20, 60), derandomize=True)
@given(data=st.data())
def test_matches_a_plain_loop(twin: Twin, data: st.DataObject):
    """Rows with and without drafts, among padded ones, in tiles of any size."""
    vocabulary = data.draw(st.sampled_from([1, 5, 31, 32, 33, 70, 100]), label="vocabulary")
    K = data.draw(st.sampled_from([0, 0, 1, 3]), label="K")
    masks = data.draw(st.sampled_from([1, K + 1, K + 2]), label="masks")
    numbers = data.draw(st.permutations(range(5)))[: data.draw(st.integers(1, 3))]
    slots: list[Slot | None] = [None] * 5
    rows: list[tuple[int, list[int]]] = []
    for number in numbers:
        slots[number] = data.draw(slots_of(vocabulary, masks), label=f"slot {number}")
        drafts = st.lists(st.integers(0, min(vocabulary, 4)), max_size=K)
        rows.append((number, data.draw(drafts, label="drafts")))
    rows += [(-1, [])] * data.draw(st.integers(0, 2))
    rows = data.draw(st.permutations(rows))
    N = len(rows) * (K + 1)
    columns = vocabulary + data.draw(st.sampled_from([0, 0, 1, 60]), label="padding")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(scale=4, size=(N, columns)).astype(np.float32)
    odd = rng.random((N, columns))
    for value, low in ((NAN, 0.0), (INF, 0.02), (-INF, 0.04), (-0.0, 0.06), (0.0, 0.08)):
        logits[(odd >= low) & (odd < low + 0.02)] = value
    logits[:, vocabulary:] = rng.choice([NAN, INF, 1e9])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", data.draw(st.sampled_from([16, 32, 64, 2048])))
        patch.setattr(module, "_MAX_BLOCK_B", data.draw(st.sampled_from([2, 1024])))
        twin.check(
            logits,
            rows,
            slots,
            K,
            vocabulary=data.draw(st.sampled_from([vocabulary, None]))
            if columns == vocabulary
            else vocabulary,
            stride=data.draw(st.sampled_from([0, 3])),
            copies=data.draw(st.booleans()),
            masks=masks,
        )


def test_all_at_once_over_several_tiles(twin: Twin):
    """Real tiles; every step changes ids in each of them."""
    vocabulary, K = 5000, 2
    rng = np.random.default_rng(0)
    everything = Slot(
        prompt=[1, 4999, 2047, 2048, 7],
        output=[4095, 2048, 2048, 3],
        allowed=[set(rng.choice(vocabulary, 4000, replace=False).tolist()) for _ in range(3)],
        bad_words=[[2048, 3, 10], [4096], [3, 4097, 2050]],
        bias={0: 5.0, 2047: -1.5, 2048: 2.0, 4999: -INF},
        repetition=1.2,
        frequency_presence=(0.4, -0.7),
        wanted=5,
        raw=True,
    )
    nothing = Slot(prompt=[1, 2], wanted=5, raw=False)
    slots = [nothing, None, everything]
    logits = rng.normal(size=(9, vocabulary + 11)).astype(np.float32)
    rows = [(2, [4097, 2050]), (-1, []), (0, [7])]
    twin.check(logits, rows, slots, K, vocabulary=vocabulary, masks=3, copies=True)


def test_a_row_without_flags_is_left_alone(twin: Twin):
    """Down to its NaNs and signed zeros; only past the vocabulary it is -inf as any other."""
    logits = np.array([[NAN, -0.0, INF, -INF, 3.0, 4.0, NAN]], np.float32)
    actual, raw = twin.run(logits, [(1, [])], [None, Slot(prompt=[0])], 0, vocabulary=5)
    assert actual[:, :5].tobytes() == logits[:, :5].tobytes()
    assert (actual[:, 5:] == -INF).all()
    assert (raw == CANARY).all()


def test_nans_stay(twin: Twin):
    """Whatever would set them to -inf: the sampler must see them."""
    slot = Slot(
        prompt=[0, 1],
        allowed=[set()],
        bad_words=[[2], [1, 3]],
        bias={1: -INF, 2: 1.0},
        repetition=2.0,
        frequency_presence=(1.0, 1.0),
    )
    logits = np.full((1, 6), NAN, np.float32)
    actual, _ = twin.run(logits, [(0, [])], [slot], 0, vocabulary=5)
    assert np.isnan(actual[0, :5]).all() and actual[0, 5] == -INF


@pytest.mark.parametrize("start, banned", [(0, {4, 9}), (2, {4}), (3, {4}), (4, set())])
def test_where_a_bad_word_may_begin(twin: Twin, start: int, banned: set[int]):
    """At position 3, [3, 4] begins at 3 and [2, 5, 3, 9] at 1: transformers bans both, vLLM one."""
    slot = Slot(
        prompt=[1, 2, 5], output=[3], bad_words=[[3, 4], [2, 5, 3, 9]], bad_words_start=start
    )
    actual, _ = twin.run(np.zeros((1, 10), np.float32), [(0, [])], [slot], 0)
    assert set(np.flatnonzero(actual[0] == -INF)) == banned


def test_a_bad_word_is_matched_over_drafts(twin: Twin):
    slot = Slot(prompt=[1, 2], output=[3], bad_words=[[3, 4, 5, 6]], bad_words_start=2)
    logits = np.zeros((8, 8), np.float32)
    rows = [(0, [4, 5, 6]), (-1, [])]
    actual, _ = twin.run(logits, rows, [slot], 3)
    assert [np.flatnonzero(row == -INF).tolist() for row in actual] == [[], [], [6], *[[]] * 5]
    # Lane 1 was fed something else.
    actual, _ = twin.run(logits, [(0, [5, 5, 6]), (-1, [])], [slot], 3)
    assert (actual == 0).all()


def test_a_masks_of_its_own_for_each_lane(twin: Twin):
    masks = [{0, 1}, {2}, {3, 4}]
    slot = Slot(prompt=[1], allowed=masks)
    actual, _ = twin.run(np.zeros((3, 5), np.float32), [(0, [2, 3])], [slot], 2, masks=3)
    assert [set(np.flatnonzero(row == 0).tolist()) for row in actual] == masks
    actual, _ = twin.run(np.zeros((1, 5), np.float32), [(0, [])], [slot], 0, masks=3)
    assert set(np.flatnonzero(actual[0] == 0).tolist()) == {0, 1}


# Other people's definitions.


def transformers_logits(logits: np.ndarray, slot: Slot) -> np.ndarray:
    """What transformers' processors make of one row, in our order."""
    from transformers.generation import logits_process as theirs

    ids = torch.tensor([[*slot.prompt, *slot.output]])
    scores = torch.from_numpy(logits)
    if slot.bad_words:
        scores = theirs.NoBadWordsLogitsProcessor(slot.bad_words)(ids, scores)
    if slot.bias:
        biases = {(i,): value for i, value in slot.bias.items()}
        scores = theirs.SequenceBiasLogitsProcessor(biases)(ids, scores)
    if slot.repetition is not None:
        scores = theirs.RepetitionPenaltyLogitsProcessor(slot.repetition)(ids, scores)
    return scores.numpy()


def random_slot(rng: np.random.Generator, vocabulary: int) -> Slot:
    output = rng.integers(0, vocabulary, 12).tolist()
    return Slot(
        prompt=rng.integers(0, vocabulary, 9).tolist(),
        output=output,
        bad_words=[[3], [output[-1], 5], [output[-2], 7]],
        bias={int(i): float(rng.normal()) for i in rng.choice(vocabulary, 4, replace=False)},
        repetition=float(rng.uniform(0.5, 2)),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("only", ["bad_words", "bias", "repetition", None])
def test_equals_transformers(twin: Twin, seed: int, only: str | None):
    """To the bit, one processor at a time and all of them."""
    rng = np.random.default_rng(seed)
    vocabulary = (50, 257)[seed % 2]
    slot = random_slot(rng, vocabulary)
    for name in ("bad_words", "bias", "repetition"):
        if only not in (None, name):
            slot = replace(slot, **{name: None})
    logits = rng.normal(scale=3, size=(1, vocabulary)).astype(np.float32)
    actual, _ = twin.run(logits, [(0, [])], [slot], 0)
    np.testing.assert_array_equal(actual, transformers_logits(logits, slot))


def vllm_logits(logits: np.ndarray, slot: Slot) -> np.ndarray:
    """vLLM V1's sampler for one row, restated from its source (see `kernels/logits/logits.py`)."""
    scores, vocabulary = torch.from_numpy(logits[0].copy()), logits.shape[1]
    if slot.allowed is not None:
        disallowed = torch.ones(vocabulary, dtype=torch.bool)
        disallowed[list(slot.allowed[0])] = False
        scores.masked_fill_(disallowed, -INF)
    for word in slot.bad_words or []:
        if len(word) > len(slot.output) + 1:
            continue
        prefix = len(word) - 1
        if (slot.output[-prefix:] if prefix else []) == word[:prefix]:
            scores[word[-1]] = -INF
    for i, value in (slot.bias or {}).items():
        scores[i] += value
    counts = torch.bincount(torch.tensor(slot.output), minlength=vocabulary)
    in_prompt = torch.bincount(torch.tensor(slot.prompt), minlength=vocabulary) > 0
    if slot.repetition is not None:
        r = torch.where(in_prompt | (counts > 0), slot.repetition, 1.0)
        scores *= torch.where(scores > 0, 1.0 / r, r)
    frequency, presence = slot.frequency_presence or (0.0, 0.0)
    scores -= frequency * counts
    scores -= presence * (counts > 0)
    return scores[None].numpy()


@pytest.mark.parametrize("seed", range(6))
def test_equals_vllm(twin: Twin, seed: int):
    """But for its product with 1 / r, which rounds twice."""
    rng = np.random.default_rng(seed)
    vocabulary = 101
    slot = replace(
        random_slot(rng, vocabulary),
        allowed=[set(rng.choice(vocabulary, 60, replace=False).tolist())],
        frequency_presence=(float(rng.normal()), float(rng.normal())),
    )
    # Here the two differ: this word begins in the prompt.
    slot.bad_words = [[3], [slot.output[-1], 5], [slot.prompt[-1], *slot.output[:2], 8]]
    slot.output = slot.output[:2] if seed % 2 else slot.output
    slot.bad_words_start = len(slot.prompt)
    logits = rng.normal(scale=3, size=(1, vocabulary)).astype(np.float32)
    actual, _ = twin.run(logits, [(0, [])], [slot], 0)
    np.testing.assert_allclose(actual, vllm_logits(logits, slot), rtol=3e-7, atol=1e-6)


def test_drafts_count_as_output(twin: Twin):
    """Lane j's logits are those of a request that has said drafts 1 .. j."""
    rng = np.random.default_rng(5)
    slot = replace(
        random_slot(rng, 40), frequency_presence=(0.5, 0.25), bad_words=[[9, 5], [9, 9, 6]]
    )
    drafts = [9, 9, slot.output[0]]
    logits = rng.normal(size=(4, 40)).astype(np.float32)
    together, _ = twin.run(logits, [(0, drafts)], [slot], 3)
    for j in range(4):
        said = replace(slot, output=[*slot.output, *drafts[:j]])
        alone, _ = twin.run(logits[j : j + 1], [(0, [])], [said], 0)
        np.testing.assert_array_equal(together[j], alone[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
@pytest.mark.parametrize("pdl", [False, True])
def test_a_captured_launch_gives_the_same_bits(pdl: bool):
    twin = Twin(process_logits, "cuda")
    rng = np.random.default_rng(2)
    vocabulary = 128_256
    slot = replace(
        random_slot(rng, vocabulary),
        allowed=[set(rng.choice(vocabulary, 90_000, replace=False).tolist())],
        frequency_presence=(0.3, 0.7),
    )
    slots = [slot, Slot(prompt=[1])]
    tensors = twin.tensors(slots, vocabulary)
    lanes = twin.lanes([(0, [5, 6, 7]), (-1, []), (1, [2, 3])], slots, 3)
    source = torch.randn(12, vocabulary, device="cuda")
    logits = torch.empty_like(source)
    expected = source.cpu()
    process_logits_reference(
        expected,
        DecodeLanes(*(lane.cpu() for lane in lanes)),
        LogitsTensors(*(tensor.cpu() for tensor in tensors)),
        num_speculative_tokens=3,
    )

    def step() -> None:
        logits.copy_(source)
        process_logits(logits, lanes, tensors, num_speculative_tokens=3, pdl=pdl)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        logits.fill_(NAN)
        graph.replay()
        assert torch.equal(logits.cpu(), expected)


# What does not fit.


def good_arguments(**changes: Any) -> dict[str, Any]:
    twin = Twin(process_logits, "cpu")
    slots = [Slot(prompt=[0]), Slot(prompt=[1])]
    good: dict[str, Any] = {
        "logits_NV": torch.zeros(4, 40),
        "lanes": twin.lanes([(0, [1]), (1, [])], slots, 1),
        "tensors": twin.tensors(slots, 40, masks=2),
        "num_speculative_tokens": 1,
    }
    return good | changes


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


WANTS = LogprobTensors(ints(2), ints(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits_NV": torch.zeros(4, 40).half()}, r"logits must be float32 \[N, V\]"),
        ({"logits_NV": torch.zeros(40, 4).t()}, r"strides \(1, 4\)"),
        ({"logits_NV": torch.zeros(4, 0)}, r"a vocabulary of 0 is outside 1 \.\."),
        ({"logits_NV": torch.zeros(3, 40)}, r"token must be a dense \[3\], not \(4,\)"),
        ({"num_speculative_tokens": 2}, r"4 lanes must be rows of 3"),
        ({"num_speculative_tokens": 32}, r"num_speculative_tokens=32, not 0\.\.31"),
        ({"vocabulary": 41}, r"vocabulary=41 is outside 1 \.\. 40"),
        ({"vocabulary": 0}, r"vocabulary=0 is outside 1 \.\. 40"),
        ({"raw_NV": torch.zeros(4, 40)}, r"raw_NV and wants are wanted together or not at all"),
        ({"raw_NV": torch.zeros(4, 39), "wants": WANTS}, r"raw must be float32 \[4, 40\]"),
        (
            {"raw_NV": torch.zeros(4, 40), "wants": LogprobTensors(ints(3), ints(3))},
            r"wanted must be a dense \[2\], not \(3,\)",
        ),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], message: str):
    process_logits(**good_arguments())
    with pytest.raises(ValueError, match=message):
        process_logits(**good_arguments(**changes))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("flags", torch.zeros(2), r"flags must be int32, not torch.float32"),
        ("bad_words_start", ints(3), r"bad_words_start must be a dense \[2\], not \(3,\)"),
        (
            "repetition_penalty",
            torch.zeros(2).double(),
            r"repetition_penalty .* torch.float64",
        ),
        ("presence_penalty", torch.zeros(3), r"presence_penalty must be .* \[2\], .* \(3,\)"),
        ("frequency_penalty", ints(2), r"frequency_penalty must be a dense torch.float32"),
        ("bias_ids", ints(3, 4), r"bias_ids must be a dense int32 of 2 dimensions for 2 slots"),
        ("bias_values", torch.zeros(2, 3), r"bias_values must be .* \[2, 4\], .* \[2, 3\]"),
        ("bitmask", ints(2, 3), r"bitmask must be a dense int32 of 3 dimensions"),
        ("bitmask", ints(2, 2, 1), r"a bitmask of 2 x 1 words a slot does not fit: .* for 40 ids"),
        ("bitmask", ints(2, 0, 2), r"a bitmask of 0 x 2 words .* of 1 mask or of 2 and more"),
        ("bad_words", ints(2, 3, 0), r"bad words of 0 tokens: \(2, 3, 0\)"),
        ("counts", ints(2, 39), r"counts of 39 ids a slot do not do for 40 ids"),
        ("counts", ints(40, 2).t(), r"counts must be int32 \[2, 1 or more\] with dense rows"),
        ("history", ints(3, 9), r"history must be int32 \[2, 1 or more\] .* \(3, 9\)"),
    ],
)
def test_wrong_tensors_are_refused(name: str, value: torch.Tensor, message: str):
    good = good_arguments()["tensors"]
    with pytest.raises(ValueError, match=message):
        process_logits(**good_arguments(tensors=good._replace(**{name: value})))


def test_tables_may_be_empty(twin: Twin):
    """The tables of an engine that takes no biases and no bad words."""
    slot = Slot(prompt=[1], repetition=2.0, bias={}, bad_words=[])
    logits = np.array([[1.0, 2.0, -3.0]], np.float32)
    actual, _ = twin.run(logits, [(0, [])], [slot], 0, biases=0, words=0, length=1)
    assert actual.tolist() == [[1.0, 1.0, -3.0]]


# What the PTX says.


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize("K", [0, 3])
@pytest.mark.parametrize("copies", [False, True])
def test_logits_are_read_after_the_wait(K: int, copies: bool):
    V, N, S = 128_256, 8, 4

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    floats = [new(S, dtype=torch.float32) for _ in range(3)]
    tensors = LogitsTensors(
        new(S),
        *floats,
        bias_ids=new(S, 300),
        bias_values=new(S, 300, dtype=torch.float32),
        bitmask=new(S, K + 1, V // 32),
        bad_words=new(S, 20, 6),
        bad_words_start=new(S),
        counts=new(S, V),
        history=new(S, 8192),
    )
    logits = new(N, V, dtype=torch.float32)
    options: dict[str, Any] = {}
    if copies:
        options = {"raw_NV": torch.empty_like(logits), "wants": LogprobTensors(new(S), new(S))}

    def call() -> None:
        lanes = DecodeLanes(new(N), new(N), new(N))
        process_logits(logits, lanes, tensors, num_speculative_tokens=K, pdl=True, **options)

    launch = record_launch(module, call)
    assert launch.grid == (N, -(-V // 2048))
    ptx, names = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    # Products are rounded before they are subtracted, as the reference's.
    assert "fma.rn.f32" not in ptx
    assert "div.rn.f32" in ptx
    loads = list(global_loads(ptx, names))
    early = {load.argument for load in loads if not load.after_wait}
    wants = {"wanted_ptr", "wants_raw_ptr"} if copies else set()
    assert early == {"lane_slot_ptr", "tensors.flags"} | wants
    assert all(
        load.past_l1 for load in loads if load.argument == "lane_slot_ptr" and not load.after_wait
    )
    late = {load.argument for load in loads if load.after_wait}
    assert {"logits_ptr", "tensors.counts", "tensors.history", "lane_token_ptr"} <= late
