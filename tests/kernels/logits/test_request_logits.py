"""Penalised requests from prompt to end: their tokens are the same with and without drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from extent import extent
from graphengine.kernels.linear.residual import new_residual
from graphengine.kernels.logits.logits import (
    LogitsTensors,
    process_logits,
    process_logits_reference,
)
from graphengine.kernels.logits.logits_triton import (
    USES_BAD_WORDS,
    USES_BIAS,
    USES_COUNTS,
    USES_MASK,
    USES_REPETITION,
)
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import sample_tiles, sample_tiles_reference
from graphengine.kernels.step.noted import (
    note_prompt,
    note_prompt_reference,
    note_tokens,
    note_tokens_reference,
)
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from graphengine.kernels.step.stop_sequences import (
    StopSequences,
    match_stop_sequences,
    match_stop_sequences_reference,
)
from launches.finish import Twin

SLOTS, VOCABULARY, COLUMNS, POSITIONS = 3, 23, 26, 64
PROMPTS = {0: [3, 4, 3], 2: [7]}
STOP = {0: [3, 5], 2: [1]}


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin("cpu", reference=True)
    return Twin(request.getfixturevalue("device"), reference=False)


class Engine:
    """The ops of a step in their order, around a target that knows token and position alone."""

    def __init__(self, twin: Twin, flags: int, temperature: float) -> None:
        self.twin, reference = twin, twin.reference
        self.process = process_logits_reference if reference else process_logits
        self.note_prompt = note_prompt_reference if reference else note_prompt
        self.note_tokens = note_tokens_reference if reference else note_tokens
        self.match = match_stop_sequences_reference if reference else match_stop_sequences
        self.tiles = sample_tiles_reference if reference else sample_tiles

        generator = torch.Generator().manual_seed(1)
        self.target = torch.randn(40, COLUMNS, generator=generator).to(twin.device)
        # Ids that do not exist are the most probable of all.
        self.target[:, VOCABULARY:] += 100

        def floats(value: float) -> torch.Tensor:
            return torch.full((SLOTS,), value, device=twin.device)

        ints = twin.ints
        self.tensors = LogitsTensors(
            flags=ints([flags] * SLOTS),
            repetition_penalty=floats(1.5),
            presence_penalty=floats(0.25),
            frequency_penalty=floats(0.75),
            bias_ids=ints([[5, -1]] * SLOTS),
            bias_values=torch.tensor([[1.5, 0.0]] * SLOTS, device=twin.device),
            bitmask=ints([[[0x7FFFBF]]] * SLOTS),
            bad_words=ints([[[-1, -1, 9], [-1, 5, 5], [3, 5, 11]]] * SLOTS),
            bad_words_start=ints([0] * SLOTS),
            counts=ints([[77] * VOCABULARY] * SLOTS),
            history=ints([[0] * POSITIONS] * SLOTS),
        )
        self.params = SamplingTensors.neutral(SLOTS, device=twin.device)._replace(
            temperature=floats(temperature), seed=torch.arange(SLOTS, device=twin.device)
        )
        sequences = [[[-1] * (2 - len(s)) + s] for s in (STOP.get(n, [-1]) for n in range(SLOTS))]
        starts = [len(PROMPTS.get(n, [])) for n in range(SLOTS)]
        self.sequences = StopSequences(ints(sequences), ints(starts), ints([6] * SLOTS))

    def logits(self, lanes: DecodeLanes) -> torch.Tensor:
        known = lanes.slot >= 0
        source = lanes.token.where(known, 0) * 7 + lanes.position.where(known, 0) * 3
        return self.target[(source % len(self.target)).long()].clone()

    def sample(self, lanes: DecodeLanes, K: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.logits(lanes)
        options: dict[str, Any] = {"num_speculative_tokens": K, "vocabulary": VOCABULARY}
        self.process(logits, lanes, self.tensors, **options)
        return self.tiles(logits, lanes.slot, lanes.position, self.params)

    def begin(self, slot: int, prompt: list[int]) -> None:
        """All but the prompt's last token, which the first step feeds."""
        tokens, ints = len(prompt), self.twin.ints
        chunk = PrefillLanes(
            ints([*prompt, 0]),
            ints([slot] * tokens + [-1]),
            ints([*range(tokens + 1)]),
            ints([0, tokens]),
            ints([tokens - 1]),
        )
        self.note_prompt(chunk, self.tensors.counts, self.tensors.history)

    def generate(self, K: int, right: list[list[int]], wrong: float = 0.0) -> list[list[int]]:
        """Each slot's tokens, up to a stop sequence or 14. Drafts are the `right` ones but for a
        share of `wrong`."""
        twin = self.twin
        state, limits = twin.state(SLOTS), twin.limits(SLOTS)
        table = torch.full((SLOTS, 3), -1, dtype=torch.int32, device=twin.device)
        for slot, prompt in PROMPTS.items():
            self.begin(slot, prompt)
            state.next_token[slot], state.kv_len[slot] = prompt[-1], len(prompt) - 1
            state.running[slot], limits.max_len[slot] = 1, len(prompt) + 14
        embedding, weight = (torch.ones(*shape, device=twin.device) for shape in ((40, 4), (4,)))
        draw = torch.Generator().manual_seed(K)
        tokens: list[list[int]] = [[] for _ in range(SLOTS)]
        for _ in range(40):
            residual = new_residual(4 * (K + 1), 4, 1, dtype=torch.float32, device=twin.device)
            lanes = twin.begin(
                *(state, twin.ints([0] * SLOTS), twin.ints([2, -1, 0, 1]), embedding, weight),
                residual,
                draft_SK=table,
                max_len_S=limits.max_len,
                num_speculative_tokens=K,
            )
            best, health = self.sample(lanes, K)
            step = twin.finish(
                *(best, health, lanes, state, limits, twin.mailbox(2, 4, 5)),
                num_speculative_tokens=K,
                draft_SK=table,
            )
            emitted = twin.ints(step.token), twin.ints(step.count)
            match = self.match(*emitted, lanes, self.tensors.history, self.sequences)
            self.note_tokens(*emitted, lanes, self.tensors.counts, self.tensors.history)
            for row, slot in enumerate(lanes.slot[:: K + 1].tolist()):
                if slot >= 0:
                    kept = int(match.count_R[row])
                    tokens[slot] += step.token[row * (K + 1) :][:kept]
                    if match.index_R[row] >= 0:
                        state.running[slot] = 0
            if not state.running.any():
                return tokens
            for slot in PROMPTS:
                for k, token in enumerate([*right[slot], 0, 0, 0][len(tokens[slot]) :][:3]):
                    table[slot, k] = token
                    if torch.rand((), generator=draw) < wrong:
                        table[slot, k] = (token + 1) % VOCABULARY
        raise AssertionError(f"still running: {state}")


ALL = USES_MASK | USES_BAD_WORDS | USES_BIAS | USES_REPETITION | USES_COUNTS


@pytest.mark.parametrize(
    ("flags", "temperature"),
    extent(
        [(0, 0.0), (ALL, 1.0)],
        [(0, 0.0), (ALL, 0.0), (ALL, 1.0), (USES_COUNTS, 0.0), (USES_BAD_WORDS, 1.0)],
    ),
)
def test_tokens_are_those_of_plain_decoding(twin: Twin, flags: int, temperature: float):
    plain = Engine(Twin("cpu", reference=True), flags, temperature).generate(0, [[]] * SLOTS)
    assert all(0 <= token < VOCABULARY for tokens in plain for token in tokens)
    assert [len(tokens) > 2 for tokens in plain] == [True, False, True]
    for drafts, wrong in ((0, 0.0), (3, 0.3)):
        assert Engine(twin, flags, temperature).generate(drafts, plain, wrong) == plain
    if flags & USES_BAD_WORDS:
        for slot, prompt in PROMPTS.items():
            said = [*prompt, *plain[slot]]
            assert 9 not in plain[slot]
            assert (5, 5) not in zip(said[len(prompt) - 1 :], plain[slot], strict=False)
    if flags & USES_MASK:
        assert not any(6 in tokens for tokens in plain)
