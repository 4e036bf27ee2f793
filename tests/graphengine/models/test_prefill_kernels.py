"""Engines whose prefill takes kernels that small models and short contexts do not: gate, up and
SwiGLU in one, and keys that are split among programs.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from engines.small_engine import LONG, OTHER, PROMPT, greedy, open_engine, sampled
from graphengine import Engine
from graphengine.models.blocks import swiglu
from graphengine.models.blocks.streams import PrefillScratch, chunk_product, whole_pieces
from graphengine.models.families.registry import read_model_config
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.shapes import SHAPES, Subject
from graphengine.speculative import MTP

attention = importlib.import_module("graphengine.kernels.attention.prefill")

# Enough outputs to keep a Hopper GPU's multiprocessors busy, and no more of the rest than it takes.
WIDE = SHAPES["tiny"] | {"hidden_size": 128, "intermediate_size": 8192}


def fuse(patch: pytest.MonkeyPatch, fused: bool) -> None:
    patch.setattr(swiglu, "fuses_swiglu", lambda weight, lanes: fused)


@pytest.mark.parametrize("speculative", [None, MTP(k=3)])
@pytest.mark.parametrize("reported", [{}, {"prompt_logprobs": 2, "logprobs": 2}])
def test_one_kernel_for_gate_and_up_says_what_two_say(
    monkeypatch: pytest.MonkeyPatch, speculative: Any, reported: dict[str, int]
) -> None:
    """On a CPU, by its reference, where both round alike; chunks of all buckets, and their lanes
    for draft modules and log-probabilities.
    """
    options = {"speculative": speculative, "prompt_logprobs": True, "max_logprobs": 2}
    calls = []

    def counted(*arguments: Any, **named: Any) -> torch.Tensor:
        calls.append(arguments[0].shape[0])
        return linear_swiglu(*arguments, **named)

    linear_swiglu = swiglu.linear_swiglu
    monkeypatch.setattr(swiglu, "linear_swiglu", counted)
    results = {}
    for fused in (False, True):
        calls.clear()
        fuse(monkeypatch, fused)
        with open_engine(device="cpu", **options) as engine:
            assert engine.model.fuses(8) == fused
            params = [greedy(9, **reported), sampled(9, seed=5), greedy(9)]
            found = engine.generate([PROMPT, LONG, OTHER], params)
            results[fused] = [(r.token_ids, r.logprobs, r.prompt_logprobs) for r in found]
        assert ({8, 32} <= set(calls)) == fused
    assert results[True] == results[False]


def test_engines_of_other_prefill_kernels_have_other_numerics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {}
    for fused in (False, True):
        fuse(monkeypatch, fused)
        with open_engine(device="cpu") as engine:
            names[fused] = engine.numerics_id
    assert names[True] != names[False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_nan_in_a_padded_lane_does_not_reach_the_lane_before_it(dtype: torch.dtype) -> None:
    """A BLAS that reads past the end of a row finds zeros there, and adds nothing."""
    weight, x = torch.randn(48, 100).to(dtype), torch.randn(64, 100).to(dtype)
    expected = (x.float() @ weight.float().t())[:37]
    x[37:] = float("nan")
    found = chunk_product(x, weight, None, out=x.new_empty(64, 48))
    torch.testing.assert_close(found[:37].float(), expected, atol=0.25, rtol=0.02)
    wide_x, wide_weight = whole_pieces(x, weight)
    assert wide_x.is_contiguous() and wide_x.shape == (64, 128) and wide_weight.shape == (48, 128)
    assert not wide_x[:, 100:].any() and not wide_weight[:, 100:].any()
    assert whole_pieces(x.float(), weight.float())[0].shape == (64, 100)


def test_a_kept_h_does_not_keep_the_scratch() -> None:
    config = read_model_config(WIDE)
    like, qkv_size = torch.empty(0, dtype=torch.bfloat16), 384
    for outlived in (False, True):
        scratch = PrefillScratch(
            16, config.hidden_size, config.prefill_width, like=like, outlived=outlived
        )
        bytes_of_h = scratch.h.untyped_storage().nbytes()
        assert (bytes_of_h == 16 * 128 * 2) == outlived
        parts = scratch.take(qkv_size), scratch.take(8, after=qkv_size)
        assert [part.shape for part in parts] == [(16, qkv_size), (16, 8)]
        addresses = [tensor.data_ptr() for tensor in (scratch.h, *parts)]
        assert len(set(addresses)) == 3


def wide_engine() -> Engine:
    subject = Subject(name="wide", hf_config=WIDE, model=read_model_config(WIDE))
    torch.manual_seed(0)
    sizes = {"max_batch": 1, "max_seq_len": 256, "prefill_buckets": (16, 128), "max_logprobs": 20}
    return build_engine(subject, {"device": "cuda"} | sizes)[0]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
def test_a_wide_model_is_fused_and_says_what_the_blas_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of the first token after a chunk, with PDL, replayed from a graph."""
    dice = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 256, (100,), generator=dice).tolist()
    found = []
    for fused in (True, False):
        if not fused:
            fuse(monkeypatch, False)
        with wide_engine() as engine:
            assert (engine.model.fuses(128), engine.model.fuses(16)) == (fused, False)
            results = [engine.generate(prompt, greedy(1, logprobs=20)) for _ in range(3)]
            first, *others = [result.logprobs for result in results]
            assert all(other == first for other in others)
            found.append({token: entry.logprob for token, entry in first[0].items()})
    fused_logprobs, blas = found
    shared = fused_logprobs.keys() & blas.keys()
    assert len(shared) >= 15, "two roundings of one distribution share most of its best tokens"
    for token in shared:
        assert fused_logprobs[token] == pytest.approx(blas[token], abs=5e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pdl", [True, False])
def test_a_turn_after_a_long_context_splits_its_keys(
    monkeypatch: pytest.MonkeyPatch, pdl: bool
) -> None:
    """Tokens of a turn of few tokens after many, of the demo model: with keys split, and whole."""
    text = 10 * "def read_lines(path):\n    with open(path) as file:\n        return list(file)\n"
    sizes = {"max_seq_len": 512, "prefill_buckets": (16, 256), "dtype": "float32", "pdl": pdl}
    said = {}
    for keys in (64, 10**6):
        monkeypatch.setattr(attention, "LEAST_SPLIT", keys)
        with open_engine(device="cuda", **sizes) as engine, engine.session() as session:
            session.append(text)
            first = session.generate(greedy(8))
            session.append("\n\ndef write_lines(")
            second = session.generate(greedy(8))
            assert second.cached_tokens > 150
            assert not engine.runtime.buffers["arrivals"].any()
            said[keys] = first.token_ids, second.token_ids
    assert said[64] == said[10**6]
