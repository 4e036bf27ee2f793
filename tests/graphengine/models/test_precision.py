"""What bfloat16 costs on a GPU: logits and the best token against transformers in float32.

The held-out text of the demo model is fed token by token through the decode step, whatever the
step itself would have sampled, so that it is the decode kernels that are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engines.named_graphs import graph_of
from graphengine import Engine, SamplingParams
from graphengine.demo import checkpoint_path, heldout_text

pytestmark = pytest.mark.gpu

# Of the largest logit in float32.
LOGITS_TOLERANCE = 3e-2
# Share of the tokens by which the engine's best may differ more often than transformers' own.
ALLOWED_LOSS = 0.003
ROWS = 64
BLOCK_SIZE = 16

Seen = dict[tuple[int, int], torch.Tensor]


def transformers_model(dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    return (
        AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=dtype, **options)
        .to("cuda")
        .eval()
    )


@pytest.fixture(scope="module")
def in_float32() -> PreTrainedModel:
    assert not torch.backends.cuda.matmul.allow_tf32
    return transformers_model(torch.float32, attn_implementation="eager")


@torch.no_grad()
def logits_of(model: PreTrainedModel, windows: torch.Tensor) -> torch.Tensor:
    """Float32 `[windows, length, V]`, a few windows at a time."""
    return torch.cat([model(part).logits.float() for part in windows.split(16)])


class Errors:
    """Differences of logits relative to the largest one: of a token, and of all that was added."""

    def __init__(self) -> None:
        self.difference = self.largest = 0.0
        self.of_tokens: list[torch.Tensor] = []

    def add(self, got: torch.Tensor, expected: torch.Tensor) -> None:
        """Two `[..., V]` of one device."""
        assert bool(got.isfinite().all()), "logits that are not finite"
        difference, largest = (got - expected).abs().amax(-1), expected.abs().amax(-1)
        self.difference = max(self.difference, float(difference.max()))
        self.largest = max(self.largest, float(largest.max()))
        self.of_tokens.append((difference / largest).flatten().cpu())

    @property
    def overall(self) -> float:
        return self.difference / self.largest

    @property
    def worst_token(self) -> float:
        return float(torch.cat(self.of_tokens).max())

    def __str__(self) -> str:
        each = torch.cat(self.of_tokens).sort().values
        p50, p99 = (float(each[int(share * (len(each) - 1))]) for share in (0.5, 0.99))
        return (
            f"{self.overall:.2e} of the largest logit; of a token's largest: p50 {p50:.2e}, "
            f"p99 {p99:.2e}, max {self.worst_token:.2e} ({len(each)} tokens)"
        )


def windows_of(ids: list[int]) -> list[torch.Tensor]:
    """The text in ROWS windows, and again in one less that start in the middles of the first.

    So every token but a few is predicted twice, after two contexts.
    """
    length = len(ids) // ROWS
    middle = length // 2
    text = torch.tensor(ids, device="cuda")
    return [
        text[: ROWS * length].view(ROWS, length),
        text[middle : middle + (ROWS - 1) * length].view(ROWS - 1, length),
    ]


def feed(engine: Engine, windows: torch.Tensor, step: Callable[[int], None]) -> None:
    """Decode the windows side by side: each `step(position)` feeds their tokens at `position`.

    Starts every slot afresh. Call with the engine's stream as the current one.
    """
    rows, length = windows.shape
    table_blocks = engine.memory.table_blocks
    assert length < engine.memory.max_seq_len and rows <= engine.config.max_batch
    assert engine.memory.kv_blocks >= rows * table_blocks
    tokens = windows.int()
    engine.runtime.buffers.reset()
    engine.runtime.buffers.load(
        {
            "slot_of_row": list(range(rows)),
            "block_table": [
                list(range(1 + slot * table_blocks, 1 + (slot + 1) * table_blocks))
                for slot in range(rows)
            ],
            "max_len": [length + 2] * rows,
        },
        sequence=1,
    )
    state = engine.runtime.program.state
    state.running[:rows] = 1
    for position in range(length):
        state.next_token[:rows] = tokens[:, position]
        step(position)
    assert state.kv_len.tolist() == [length] * rows + [0] * (engine.config.max_batch - rows)
    assert state.running.tolist() == [1] * rows + [0] * (engine.config.max_batch - rows)


def teacher_forced(
    engine: Engine, windows: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits `[rows, length, V]` of the eager step; each graph's best tokens `[rows, length]`."""
    rows, length = windows.shape
    program = engine.runtime.program
    logits = torch.empty(rows, length, engine.model.config.vocab_size, device="cuda")
    best: dict[str, torch.Tensor] = {}

    def run_eagerly(position: int) -> None:
        outputs = program.decode(ROWS, "full")
        assert outputs.logits is not None
        logits[:, position] = outputs.logits[:rows]

    def replay(sampler: str, position: int) -> None:
        # On the engine's stream, which is the current one.
        graph_of(engine, f"decode/{ROWS}/{sampler}").replay()
        best[sampler][:, position] = program.state.next_token[:rows]

    on_stream: AbstractContextManager[Any] = engine.runtime.on_stream()
    torch.cuda.synchronize()
    with on_stream:
        feed(engine, windows, run_eagerly)
        for sampler in ("fast", "full"):
            best[sampler] = torch.empty(rows, length, dtype=torch.int32, device="cuda")
            feed(engine, windows, partial(replay, sampler))
    torch.cuda.synchronize()
    return logits, best


def test_decoding_heldout_text(
    in_float32: PreTrainedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    in_bfloat16 = transformers_model(torch.bfloat16)
    ours, theirs = Errors(), Errors()
    tokens = agreed = agreed_theirs = right = right_theirs = right_float32 = 0
    with Engine.from_pretrained(
        checkpoint_path(),
        device="cuda",
        dtype="bfloat16",
        max_batch=ROWS,
        buckets=(ROWS,),
        max_seq_len=512,
        block_size=BLOCK_SIZE,
        prefill_buckets=(16,),
    ) as engine:
        assert engine.tokenizer is not None
        for windows in windows_of(engine.tokenizer.encode(heldout_text())):
            logits, best_of = teacher_forced(engine, windows)
            for sampler, chosen in best_of.items():
                differ = int((chosen != logits.argmax(-1)).sum())
                assert not differ, f"graph {sampler} and eager step: {differ} tokens differ"
            best = best_of["fast"]
            expected = logits_of(in_float32, windows)
            ours.add(logits, expected)
            expected_best = expected.argmax(-1)
            agreed += int((best == expected_best).sum())
            logits_theirs = logits_of(in_bfloat16, windows)
            theirs.add(logits_theirs, expected)
            best_theirs = logits_theirs.argmax(-1)
            agreed_theirs += int((best_theirs == expected_best).sum())
            following = windows[:, 1:]
            right += int((best[:, :-1] == following).sum())
            right_theirs += int((best_theirs[:, :-1] == following).sum())
            right_float32 += int((expected_best[:, :-1] == following).sum())
            tokens += windows.numel()
    share, share_theirs = agreed / tokens, agreed_theirs / tokens
    with capsys.disabled():
        print(
            f"\nheld-out text, {tokens} teacher-forced tokens, bfloat16 against float32\n"
            f"  best token agrees   graphengine {share:.4%}, transformers {share_theirs:.4%}\n"
            f"  best token is next  graphengine {right / tokens:.4%}, "
            f"transformers {right_theirs / tokens:.4%}, in float32 {right_float32 / tokens:.4%}\n"
            f"  logits graphengine  {ours}\n"
            f"  logits transformers {theirs}"
        )
    assert tokens >= 20_000
    assert share >= share_theirs - ALLOWED_LOSS
    # The text is one the model can read: or agreement would show little.
    assert right_float32 / tokens > 0.3
    assert ours.worst_token <= LOGITS_TOLERANCE


def test_prefilling_heldout_text(
    in_float32: PreTrainedModel,
    eager: Callable[[Engine], Seen],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The logits after prompts that fill each bucket, fall one short of it, or spill over."""
    errors = Errors()
    lengths = (1, 2, 15, 16, 17, 63, 64, 65, 200, 256, 257, 700, 1023, 1024, 1025, 1500, 2047)
    with Engine.from_pretrained(
        checkpoint_path(),
        device="cuda",
        dtype="bfloat16",
        max_batch=1,
        max_seq_len=2048,
        block_size=BLOCK_SIZE,
        lookahead=0,
    ) as engine:
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode(heldout_text())[-2048:]
        expected = logits_of(in_float32, torch.tensor([ids], device="cuda"))[0].cpu()
        seen = eager(engine)
        for length in lengths:
            seen.clear()
            engine.generate(ids[:length], SamplingParams(temperature=0.0, max_tokens=1))
            assert list(seen) == [(0, length - 1)]
            errors.add(seen[0, length - 1], expected[length - 1])
        buckets = {f"replays/prefill/{size}" for size in engine.memory.prefill_ladder.sizes}
        assert buckets <= {name for name, count in engine.counters.items() if count}
    with capsys.disabled():
        print(f"\nprefill of held-out text, bfloat16 against float32\n  logits {errors}")
    assert errors.worst_token <= LOGITS_TOLERANCE


@pytest.mark.parametrize("family", ["fma", "dot"])
def test_random_models(
    oracle: Any, eager: Callable[[Engine], Seen], capsys: pytest.CaptureFixture[str], family: str
) -> None:
    """Prefill and 48 decoded tokens, against float32 with the weights that the engine has."""
    model = deepcopy(oracle.model)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    errors = Errors()
    with Engine.from_pretrained(
        oracle.path,
        device="cuda",
        dtype="bfloat16",
        max_batch=1,
        max_seq_len=200,
        row_family=family,
        block_size=8,
        lookahead=0,
        prefill_buckets=(16, 64),
    ) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
        for prompt in oracle.prompts((1, 16, 17, 75)):
            seen = eager(engine)
            result = engine.generate(prompt, params)
            sequence = torch.tensor([[*prompt, *result.token_ids]])
            with torch.no_grad():
                expected = model(sequence).logits[0].float()
            positions = [position for _, position in seen]
            assert len(positions) >= len(result.token_ids)
            errors.add(torch.stack([*seen.values()]), expected[positions])
    with capsys.disabled():
        print(f"\n{oracle.path.name}, {family}, bfloat16 against float32\n  logits {errors}")
    assert errors.overall <= LOGITS_TOLERANCE
