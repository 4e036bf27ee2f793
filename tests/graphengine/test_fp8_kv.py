"""Engines whose KV is e4m3 say, however they go about it, what a plain run of such an engine says.

Pauses, sessions, prefixes, snapshots and drafts move or skip KV, and must do so with its bytes and
its scales.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.few_layers import few_layers
from checkpoints.mtp_modules import write_random
from engines.conversations import SIZES, converse
from engines.small_engine import LONG, OTHER, PROMPT, greedy, open_engine, sampled
from engines.speculation import Job, Outcome, outcomes
from graphengine import Engine, SessionSnapshot
from graphengine.speculative import MTP, DraftModel, NGram, Speculative

# Scales that are not 1 on both sides, so that a forgotten one shows.
FP8: dict[str, Any] = {"kv_dtype": "fp8", "kv_calibration": LONG, "row_family": "dot"}
MODES: dict[str, Speculative | None] = {
    "none": None,
    "eagle": MTP(k=3),
    "ngram": NGram(k=3),
    "model": DraftModel(few_layers(), k=2),
}


def open_fp8(device: str, path: Path | None = None, **options: Any) -> Engine:
    # A GPU's half precision has a kernel of its own.
    dtype = "bfloat16" if device == "cuda" else "float32"
    return open_engine(path, **FP8 | {"device": device, "dtype": dtype} | options)


JOBS = [
    Job(PROMPT, greedy(36, ignore_eos=True)),
    Job(OTHER, sampled(36, seed=3)),
    Job(LONG, greedy(36, ignore_eos=True)),
]


@functools.cache
def plain_outcomes(device: str) -> list[Outcome]:
    with open_fp8(device) as alone:
        assert alone.cache.dtype == torch.float8_e4m3fn
        return [outcomes(alone, [job])[0] for job in JOBS]


@pytest.mark.parametrize("name", MODES)
def test_drafts_and_pauses_change_no_token(device: str, name: str) -> None:
    # Three requests that end at 6 to 9 blocks, in a pool of 12.
    with open_fp8(device, speculative=MODES[name], kv_blocks=12, swap_blocks=24) as engine:
        assert outcomes(engine, JOBS) == plain_outcomes(device)
        assert engine.counters["pauses"] > 0 and engine.counters["resumes"] > 0
        if name == "model":
            # Its own scales are those of the target: it is the same model after the same prompt.
            assert engine.acceptance.accepted == engine.acceptance.proposed > 0
        elif name != "none":
            assert engine.acceptance.accepted > 0
        assert {area.dtype for _, area in engine.runtime.caches} == {torch.float8_e4m3fn}


@pytest.mark.parametrize("mode", [None, MTP(k=2, style="vanilla")], ids=["plain", "vanilla"])
def test_a_conversation_says_what_requests_of_the_whole_of_it_say(
    device: str, tmp_path: Path, mode: Speculative | None
) -> None:
    """With rewinds and forks, and from the middle of it in another engine, by a snapshot's file."""
    path = write_random(tmp_path / "model", "mimo")
    options = SIZES | {"device": device, "kv_calibration": list(range(40))}
    file = tmp_path / "session.safetensors"
    with (
        open_fp8(path=path, speculative=mode, **options) as engine,
        open_fp8(path=path, speculative=mode, **options) as other,
        open_fp8(path=path, **options) as alone,
        engine.session() as session,
    ):
        vocab = engine.model.config.vocab_size
        converse(session, 0, 6, vocab_size=vocab, alone=alone)
        kept = session.snapshot(file)
        assert kept.blocks > 2 and {cache.dtype for cache in kept.caches} == {torch.float8_e4m3fn}
        with other.restore_session(file) as restored:
            said = converse(restored, 6, 10, vocab_size=vocab, alone=alone)
        assert converse(session, 6, 10, vocab_size=vocab) == said
        assert engine.counters["sessions/reused_tokens"] > 100


def test_a_prefix_that_is_found_again_is_not_quantised_twice(device: str) -> None:
    with open_fp8(device, prefix_caching=True) as engine, open_fp8(device) as alone:
        for text in ("", "x = 1", "\nif x:"):
            expected = alone.generate(LONG + text, greedy(16))
            result = engine.generate(LONG + text, greedy(16))
            assert result.token_ids == expected.token_ids
            assert (result.cached_tokens > 0) == bool(text)


def test_blocks_that_nobody_wrote_may_hold_anything(device: str) -> None:
    """NaN, and the largest number, which is what an infinity saturates to."""
    with open_fp8(device, speculative=MTP(k=2)) as engine:
        expected = engine.generate(LONG, greedy(9)).token_ids
        for byte in (0x7F, 0xFE):
            for cache, _ in engine.runtime.caches:
                cache.view(torch.uint8).fill_(byte)
            assert engine.generate(LONG, greedy(9)).token_ids == expected


# A snapshot is of one kind of KV and of its scales.


def snapshot_of(engine: Engine) -> SessionSnapshot:
    with engine.session() as session:
        session.append(LONG)
        session.generate(greedy(3, ignore_eos=True))
        return session.snapshot()


def test_a_snapshot_of_other_kv_is_refused() -> None:
    unit = {"kv_calibration": None}
    with (
        open_fp8("cpu") as fp8,
        open_fp8("cpu", **unit) as other_scales,
        open_engine(device="cpu", dtype="float32", row_family="dot") as plain,
        open_fp8("cpu", speculative=MTP(k=1)) as drafting,
    ):
        kept, wide = snapshot_of(fp8), snapshot_of(plain)
        assert kept.nbytes * 4 == wide.nbytes
        scales = "KV float8_e4m3fn of scales [0-9a-f]{12}"
        refused = rf"dtype='float32, {scales}', the engine of 'float32'$"
        with pytest.raises(ValueError, match=refused):
            plain.restore_session(kept)
        with pytest.raises(ValueError, match=rf"of dtype='float32', the engine of '.*, {scales}'$"):
            fp8.restore_session(wide)
        with pytest.raises(ValueError, match=rf"'float32, {scales}', the engine of '.*, {scales}'"):
            other_scales.restore_session(kept)
        ids = {each.numerics_id for each in (fp8, other_scales, plain)}
        assert len(ids) == 3 and drafting.numerics_id == fp8.numerics_id
        # The drafter's scales are no part of the numerics, but its KV is in the snapshot.
        drafted = snapshot_of(drafting)
        assert drafting.core.drafter.weights is not None
        for scale in drafting.core.drafter.weights.kv_scales().values():
            scale.mul_(2)
        with pytest.raises(ValueError, match=rf"'float32, {scales}', the engine of '.*, {scales}'"):
            drafting.restore_session(drafted)
        with fp8.restore_session(kept) as restored:
            assert restored.cached_tokens == kept.blocks * 8
            assert restored.snapshot().digests == kept.digests


def test_kv_is_brought_back_to_the_bit(device: str) -> None:
    """Every byte, NaN with either sign among them: from and to blocks, and through the swap."""
    with open_fp8(device, speculative=MTP(k=1), kv_blocks=16, swap_blocks=16) as engine:
        runtime = engine.runtime
        for cache, _ in runtime.caches:
            flat = cache.view(torch.uint8).view(-1)
            flat.copy_(torch.arange(flat.numel(), device=flat.device) % 256)
        before = [cache.view(torch.uint8).clone() for cache, _ in runtime.caches]
        kept = runtime.read_blocks([3, 1])
        assert [part.dtype for part in kept] == [torch.float8_e4m3fn] * 2
        runtime.write_blocks([5, 6], kept)
        runtime.load({"swap_pairs": [[3, 0], [1, 1]]})
        runtime.swap(2, 0)
        runtime.synchronize()
        runtime.buffers.acknowledge(runtime.launched + 1)
        runtime.buffers.load({"swap_pairs": [[0, 7], [1, 8]]}, sequence=2, stream=runtime.stream)
        runtime.swap(0, 2)
        runtime.synchronize()
        for (cache, _), old in zip(runtime.caches, before, strict=True):
            found = cache.view(torch.uint8)
            for source, *copies in ((3, 5, 7), (1, 6, 8)):
                for copy in copies:
                    assert torch.equal(found[:, copy], old[:, source])


def test_the_report_and_the_description_say_so() -> None:
    with open_fp8("cpu") as engine, open_engine(device="cpu") as plain:
        assert "device cpu, float32, KV float8_e4m3fn, max_seq_len" in str(engine.report())
        assert "fp8 blocks of 8 tokens" in str(engine.report())
        assert re.search(r"calibration \(KV of \d\d tokens in float32, ", str(engine.report()))
        assert "device cpu, float32, max_seq_len" in str(plain.report())
        assert engine.core.description["kv_dtype"] == "float8_e4m3fn"
        assert plain.core.description["kv_dtype"] == "float32"
