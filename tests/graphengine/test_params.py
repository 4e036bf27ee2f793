"""What users pass in: SamplingParams, EngineConfig, and the handle they get back.

Defaults are vLLM's; every check names the field and the value that it refused.
"""

from __future__ import annotations

import dataclasses
import math
import re
from fractions import Fraction
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from graphengine.config import EngineConfig
from graphengine.demo import checkpoint_path
from graphengine.engine_options import EngineOptions
from graphengine.options.devices import DTYPES
from graphengine.requests.job import Job
from graphengine.requests.request import Event, Phase, Request, Timings
from graphengine.sampling_params import SamplingParams
from graphengine.speculative import NGram, UserProvided
from graphengine.text.tokenizer import TextStream, Tokenizer

# As in vllm/sampling_params.py; stop_token_ids of None are kept as ().
VLLM_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": (),
    "ignore_eos": False,
    "max_tokens": 256,
    "min_tokens": 0,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "allowed_token_ids": None,
    "bad_words": None,
    "logit_bias": None,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logprobs": None,
    "logprobs_mode": None,
    "prompt_logprobs": None,
    "forced_tokens": False,
    "structured_outputs": None,
    "routing": None,
}
# What vLLM has no name for: it changes nothing unless it is given.
OWN_DEFAULTS = {
    "top_n_sigma": 0.0, "remove_eos": False, "add_bos": None, "stop_token_sequences": (),
    "codes": None, "forced_codes": None, "feed": None,
}  # fmt: skip
DEFAULTS = VLLM_DEFAULTS | OWN_DEFAULTS


def test_numbers_become_pythons_own() -> None:
    """NumPy's wrap around, and of fractions a field can make nothing."""
    params = SamplingParams(
        temperature=Fraction(1, 2), top_p=np.float32(0.5), repetition_penalty=Fraction(3, 2),
        max_tokens=np.int8(100), min_tokens=np.int8(100), seed=np.int64(3), logprobs=np.int64(2),
        stop_token_ids=[np.int32(5)], logit_bias={np.int64(7): Fraction(1, 4)},
    )  # fmt: skip
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0.5, 0.5, 1.5)
    kinds = {
        type(getattr(params, name)) for name in ("max_tokens", "min_tokens", "seed", "logprobs")
    }
    assert kinds == {int} and params.max_tokens + params.min_tokens == 200  # type: ignore[operator]
    assert params.stop_token_ids == (5,) and params.logit_bias == {7: 0.25}
    assert all(type(value) is float for value in params.logit_bias.values())
    assert SamplingParams(stop_token_ids=None) == SamplingParams()


def make_request(cancelled: list[Request]) -> Request:
    return Request(
        request_id=7,
        prompt_token_ids=[3, 1, 4],
        params=SamplingParams(min_tokens=5),
        seed=99,
        submitted=1.5,
        cancelled=cancelled,
        job=Job(prompt_len=3, max_len=19, min_tokens=5),
    )


# SamplingParams.


def test_sampling_defaults_are_vllms() -> None:
    assert dataclasses.asdict(SamplingParams()) == DEFAULTS


TOP_K = "must be in [1, 2147483647], or 0 or -1 for all tokens"
TOP_N_SIGMA = "must be 0, or in [1.1754944e-38, 3.4028234e+38]"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.5}, "temperature=-0.5 must be 0, or in [1e-06, 3.4028234e+38]"),
        ({"temperature": math.nan}, "temperature=nan must be 0, or in [1e-06, 3.4028234e+38]"),
        ({"temperature": math.inf}, "temperature=inf must be 0, or in [1e-06, 3.4028234e+38]"),
        ({"temperature": 1e39}, "temperature=1e+39 must be 0, or in [1e-06, 3.4028234e+38]"),
        ({"top_k": -2}, f"top_k=-2 {TOP_K}"),
        (
            {"top_k": 2**31},
            f"top_k=2147483648 {TOP_K}",
        ),
        ({"top_k": 1.5}, "top_k=1.5 must be an integer"),
        ({"top_p": -0.25}, "top_p=-0.25 must be in [0, 1]"),
        ({"top_p": 1.25}, "top_p=1.25 must be in [0, 1]"),
        ({"top_p": math.nan}, "top_p=nan must be in [0, 1]"),
        ({"min_p": -0.25}, "min_p=-0.25 must be in [0, 1]"),
        ({"min_p": 1.5}, "min_p=1.5 must be in [0, 1]"),
        ({"min_p": math.nan}, "min_p=nan must be in [0, 1]"),
        ({"top_n_sigma": -0.5}, f"top_n_sigma=-0.5 {TOP_N_SIGMA}"),
        (
            {"top_n_sigma": 1e-46},
            f"top_n_sigma=1e-46 {TOP_N_SIGMA}",
        ),
        ({"top_k": 10**5000}, f"top_k=an integer of 16610 bits {TOP_K}"),
        (
            {"top_n_sigma": math.inf},
            f"top_n_sigma=inf {TOP_N_SIGMA}",
        ),
        (
            {"top_n_sigma": math.nan},
            f"top_n_sigma=nan {TOP_N_SIGMA}",
        ),
        ({"top_n_sigma": "1"}, "top_n_sigma='1' must be a number"),
        ({"seed": "7"}, "seed='7' must be an integer"),
        ({"seed": True}, "seed=True must be an integer"),
        ({"seed": -1}, "seed=-1 must be in [0, 2**63)"),
        ({"seed": 2**63}, "seed=9223372036854775808 must be in [0, 2**63)"),
        ({"max_tokens": 8.0}, "max_tokens=8.0 must be an integer"),
        ({"allowed_token_ids": []}, "allowed_token_ids=[] must hold a token id at least"),
        ({"allowed_token_ids": 3}, "allowed_token_ids=3 must be a list of token ids"),
        ({"allowed_token_ids": [1.0]}, "allowed_token_ids holds 1.0, which is not a token id"),
        ({"bad_words": "word"}, "bad_words='word' must be a list"),
        ({"bad_words": [""]}, "bad_words=[''] must hold no empty string"),
        ({"bad_words": [[]]}, "a word of bad_words=[] must hold a token id at least"),
        ({"logit_bias": [1]}, "logit_bias=[1] must be a mapping from token ids to numbers"),
        ({"logit_bias": {"1": 2}}, "logit_bias is for '1', which is not a token id"),
        ({"logit_bias": {1: math.inf}}, "logit_bias[1]=inf must be in [-1e+20, 1e+20], or -inf"),
        (
            {"logit_bias": {1: 10**5000}},
            "logit_bias[1]=an integer of 16610 bits must be in [-1e+20, 1e+20], or -inf",
        ),
        (
            {"stop": ["a"] * 200 + [""]},
            f"stop={str(('a',) * 200)[:100]}... must be strings that are not empty",
        ),
        ({"logit_bias": {1: math.nan}}, "logit_bias[1]=nan must be in [-1e+20, 1e+20], or -inf"),
        ({"logit_bias": {1: "2"}}, "logit_bias[1]='2' must be a number"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 must be in [1e-06, 1e+06]"),
        ({"repetition_penalty": math.inf}, "repetition_penalty=inf must be in [1e-06, 1e+06]"),
        ({"repetition_penalty": None}, "repetition_penalty=None must be a number"),
        ({"frequency_penalty": 2.5}, "frequency_penalty=2.5 must be in [-2, 2]"),
        ({"presence_penalty": math.nan}, "presence_penalty=nan must be in [-2, 2]"),
        ({"logprobs": 21}, "logprobs=21 must be an integer in [0, 20], or None for none"),
        ({"logprobs": -1}, "logprobs=-1 must be an integer in [0, 20], or None for none"),
        (
            {"prompt_logprobs": -1},
            "prompt_logprobs=-1 must be an integer in [0, 20], or None for none",
        ),
        ({"logprobs": True}, "logprobs=True must be an integer in [0, 20], or None for none"),
        ({"stop_token_sequences": 3}, "stop_token_sequences=3 must be a list"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1, or None, or 0 with prompt_logprobs"),
        (
            {"max_tokens": -1, "prompt_logprobs": 0},
            "max_tokens=-1 must be at least 1, or None, or 0 with prompt_logprobs",
        ),
        ({"min_tokens": -3}, "min_tokens=-3 must be in [0, 1073741823]"),
        (
            {"min_tokens": 2**30, "max_tokens": None},
            "min_tokens=1073741824 must be in [0, 1073741823]",
        ),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 exceeds max_tokens=4"),
        ({"min_tokens": 257}, "min_tokens=257 exceeds max_tokens=256"),
        ({"stop": ""}, "stop='' must be strings that are not empty"),
        ({"stop": ["a", ""]}, "stop=('a', '') must be strings that are not empty"),
        ({"stop": [13]}, "stop=(13,) must be strings that are not empty"),
        ({"add_bos": 1}, "add_bos=1 must be True, False or None"),
        ({"remove_eos": None}, "remove_eos=None must be True or False"),
        ({"skip_special_tokens": 0}, "skip_special_tokens=0 must be True or False"),
        (
            {"include_stop_str_in_output": "yes"},
            "include_stop_str_in_output='yes' must be True or False",
        ),
        ({"stop_token_ids": [2, 3.0]}, "stop_token_ids holds 3.0, which is not an integer"),
    ],
)
def test_sampling_errors_name_the_field_and_its_value(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as refused:
        SamplingParams(**options)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"top_k": -1},
        {"top_k": 1},
        {"top_k": 2**31 - 1},
        {"top_p": 0.0},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"top_n_sigma": 3e38},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"max_tokens": 1},
        {"max_tokens": None, "min_tokens": 2**30 - 1},
        {"stop_token_ids": (0, 2)},
        {"min_tokens": 16},
        {"stop": ()},
        {"stop": "\n"},
        {"allowed_token_ids": (0,)},
        {"bad_words": ("a", (3, 4))},
        {"bad_words": ()},
        {"logit_bias": {0: -math.inf, 7: 1e20}},
        {"repetition_penalty": 1e-6},
        {"frequency_penalty": -2.0, "presence_penalty": 2},
        {"logprobs": 0},
        {"logprobs": 20, "prompt_logprobs": 20},
        {"stop_token_sequences": ((1,), (2, 3))},
    ],
)
def test_the_ends_of_the_sampling_ranges_are_allowed(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    assert dataclasses.asdict(params) == DEFAULTS | options


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, ()), ("ab", ("ab",)), (["a", "bc"], ("a", "bc")), ((), ())]
)
def test_stop_strings_are_always_a_tuple(stop: Any, strings: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop_strings == strings


@pytest.mark.parametrize(
    ("options", "filtered"),
    [
        ({}, False),
        ({"top_k": -1, "top_p": 1.0, "min_p": 0.0}, False),
        ({"top_k": 1}, True),
        ({"top_p": 0.99}, True),
        ({"min_p": 0.01}, True),
        ({"top_n_sigma": 0.01}, True),
        ({"temperature": 0, "top_n_sigma": 1.0}, False),
        ({"temperature": 0, "top_k": 1, "top_p": 0.5, "min_p": 0.5}, False),
        ({"temperature": 1e-6, "top_k": 2**31 - 1}, True),
    ],
)
def test_filters_count_where_something_is_drawn(options: dict[str, Any], filtered: bool) -> None:
    assert SamplingParams(**options).filtered is filtered


@pytest.mark.parametrize("made", [SamplingParams(), EngineConfig(device="cpu")])
def test_parameters_are_frozen_and_keyword_only(made: Any) -> None:
    first = dataclasses.fields(made)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, first, getattr(made, first))
    with pytest.raises(TypeError, match="positional"):
        type(made)(getattr(made, first))
    with pytest.raises(TypeError, match="unknown"):
        type(made)(unknown=1)
    assert not hasattr(made, "__dict__")


# EngineConfig.


def test_engine_defaults() -> None:
    config = EngineConfig(device="cpu")
    assert dataclasses.asdict(config) == {
        "device": "cpu",
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "expert_parallel": False,
        "data_parallel": 1,
        "load_format": "auto",
        "dtype": None,
        "quantize": None,
        "quantize_lm_head": False,
        "activations": None,
        "max_batch": 8,
        "max_seq_len": None,
        "buckets": None,
        "prefill_buckets": (16, 64, 128, 256, 512, 1024),
        "max_prefill_tokens_per_step": None,
        "max_prefill_ms_per_step": None,
        "prefill_cut": None,
        "block_size": 16,
        "kv_blocks": None,
        "swap_blocks": None,
        "kv_dtype": "auto",
        "kv_calibration": None,
        "prefix_caching": False,
        "session_blocks": None,
        "state_dtype": "auto",
        "session_states": 4,
        "window_rings": True,
        "lookahead": None,
        "steps_per_launch": 1,
        "prompts_per_prefill": 1,
        "grammar_pool_mib": 0,
        "memory_fraction": 0.9,
        "releasable": False,
        "max_waiting": None,
        "max_stop_ids": 16,
        "max_logit_bias": 300,
        "max_bad_words": 64,
        "max_bad_word_tokens": 8,
        "max_stop_sequences": 8,
        "max_stop_sequence_tokens": 16,
        "max_logprobs": 20,
        "prompt_logprobs": False,
        "prompt_logprobs_out": False,
        "logprobs_mode": "raw_logprobs",
        "sampling_defaults": "engine",
        "record_routing": False,
        "adapters": None,
        "max_adapters": None,
        "max_adapter_rank": 32,
        "merge_adapter": None,
        "prompt_embeds": False,
        "pdl": True,
        "row_family": None,
        "speculative": None,
        "gate": None,
        "draft_len_schedule": None,
        "relaxed_acceptance": None,
        "forced_acceptance": None,
        "seed": 0,
        "wait": "spin",
        "wait_limit_s": 30.0,
        "collect_while_waiting": True,
    }
    assert config.torch_dtype is None
    assert EngineConfig().device == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "mps"}, "device='mps': must be 'cpu', 'cuda' or 'cuda:N'"),
        ({"device": "cpu:x"}, "device='cpu:x': must be 'cpu', 'cuda' or 'cuda:N'"),
        ({"device": "cpu:9"}, "device='cpu:9': must be 'cpu', 'cuda' or 'cuda:N'"),
        ({"device": "cuda:-1"}, "device='cuda:-1': must be 'cpu', 'cuda' or 'cuda:N'"),
        ({"dtype": "float8"}, "dtype=float8: must be one of float32, bfloat16, float16, auto"),
        (
            {"dtype": torch.float64},
            "dtype=torch.float64: must be one of float32, bfloat16, float16, auto",
        ),
        ({"max_batch": 0}, "max_batch=0 must be in [1, 64]"),
        ({"max_batch": 65}, "max_batch=65 must be in [1, 64]"),
        ({"max_seq_len": 1}, "max_seq_len=1 must be at least 2"),
        ({"block_size": 4}, "block_size=4 must be a power of two from 8 to 128"),
        ({"block_size": 24}, "block_size=24 must be a power of two from 8 to 128"),
        ({"block_size": 256}, "block_size=256 must be a power of two from 8 to 128"),
        ({"prefill_buckets": ()}, "prefill_buckets must name at least one size"),
        ({"buckets": []}, "buckets must name at least one size"),
        ({"prefill_buckets": (16, 0)}, "prefill_buckets=(16, 0) must be positive integers"),
        ({"lookahead": 3}, "lookahead=3 must be in [0, 2]"),
        ({"lookahead": -1}, "lookahead=-1 must be in [0, 2]"),
        ({"steps_per_launch": 0}, "steps_per_launch=0 must be in [1, 64]"),
        ({"steps_per_launch": 65}, "steps_per_launch=65 must be in [1, 64]"),
        (
            {"steps_per_launch": 16, "speculative": UserProvided(k=3)},
            "speculative=UserProvided(k=3) has the host read each step before the next one is "
            "launched: it is for steps_per_launch=1, not 16",
        ),
        (
            {"steps_per_launch": 16, "data_parallel": 2},
            "steps_per_launch=16 is for ranks that have the same requests, not for "
            "data_parallel=2: a prompt of one rank would delay all others",
        ),
        ({"memory_fraction": 0.0}, "memory_fraction=0.0 must be in (0, 1]"),
        ({"memory_fraction": 1.1}, "memory_fraction=1.1 must be in (0, 1]"),
        ({"memory_fraction": math.nan}, "memory_fraction=nan must be in (0, 1]"),
        ({"max_stop_ids": 0}, "max_stop_ids=0 must be in [1, 1024]"),
        ({"seed": -1}, "seed=-1 must be in [0, 2**63)"),
        ({"seed": 2**63}, "seed=9223372036854775808 must be in [0, 2**63)"),
        ({"wait": "sleep"}, "wait='sleep' must be 'spin', 'yield' or 'block'"),
        ({"wait_limit_s": 0.0}, "wait_limit_s=0.0 must be positive and finite"),
        ({"wait_limit_s": math.inf}, "wait_limit_s=inf must be positive and finite"),
        ({"wait_limit_s": math.nan}, "wait_limit_s=nan must be positive and finite"),
        ({"kv_blocks": -1}, "kv_blocks=-1 must be at least 1"),
        ({"load_format": "pt"}, "load_format='pt' must be 'auto' or 'dummy'"),
        ({"quantize": "int3"}, "quantize='int3' must be 'fp8', 'int8', 'int4' or None"),
        (
            {"quantize_lm_head": True},
            "quantize_lm_head=True is for an engine with quantize, which is None",
        ),
        ({"kv_dtype": "fp4"}, "kv_dtype='fp4' must be 'auto' or 'fp8'"),
        ({"state_dtype": "fp8"}, "state_dtype='fp8' must be 'auto', 'float32' or 'bfloat16'"),
        ({"kv_calibration": "x"}, "kv_calibration is for kv_dtype='fp8', not for kv_dtype='auto'"),
        (
            {"kv_dtype": "fp8", "kv_calibration": 5},
            "kv_calibration=5 must be text or a list of token ids",
        ),
        (
            {"kv_dtype": "fp8", "kv_calibration": ["x"]},
            "kv_calibration=['x'] has 'x' at index 0: token ids are integers in [0, 2147483647]",
        ),
        ({"swap_blocks": -2}, "swap_blocks=-2 must not be negative"),
        (
            {"max_prefill_tokens_per_step": 0},
            "max_prefill_tokens_per_step=0 must be at least 1",
        ),
        (
            {"max_prefill_tokens_per_step": 1.5},
            "max_prefill_tokens_per_step=1.5 must be an integer",
        ),
        (
            {"max_prefill_ms_per_step": 5, "prefill_cut": [[0, 16]]},
            "prefill_cut=((0, 16),) says where prompts are cut, and max_prefill_ms_per_step=5 has "
            "that measured: give one of them",
        ),
        ({"pdl": 1}, "pdl=1 must be True or False"),
        ({"pdl": None}, "pdl=None must be True or False"),
        ({"collect_while_waiting": 0}, "collect_while_waiting=0 must be True or False"),
        ({"row_family": "wgmma"}, "row_family='wgmma' must be 'fma', 'dot' or None"),
        ({"row_family": "FMA"}, "row_family='FMA' must be 'fma', 'dot' or None"),
        ({"row_family": ["fma"]}, "row_family=['fma'] must be 'fma', 'dot' or None"),
        (
            {"row_family": "fma", "max_batch": 3},
            "row_family='fma' serves up to 2 lanes a step, not the 3 of max_batch=3",
        ),
        (
            {"row_family": "fma"},
            "row_family='fma' serves up to 2 lanes a step, not the 8 of max_batch=8",
        ),
    ],
)
def test_engine_errors_name_the_field_and_its_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        EngineConfig(**({"device": "cpu"} | options))
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("max_batch", "asked", "family"),
    [
        (1, None, "fma"),
        (2, None, "dot"),
        (3, None, "dot"),
        (64, None, "dot"),
        (1, "dot", "dot"),
        (2, "fma", "fma"),
        (8, "dot", "dot"),
    ],
)
def test_the_row_family_follows_from_max_batch_unless_asked_for(
    max_batch: int, asked: Any, family: str
) -> None:
    assert EngineConfig(device="cpu", max_batch=max_batch, row_family=asked).family == family


@pytest.mark.parametrize(
    ("max_seq_len", "asked", "chain"),
    [(4096, None, "fma"), (4097, None, "dot"), (4096, "dot", "dot"), (None, None, "fma")],
)
def test_chains_of_drafts_of_long_requests_are_in_their_engines_family(
    max_seq_len: int | None, asked: Any, chain: str
) -> None:
    sizes: Any = {"max_batch": 1, "max_seq_len": max_seq_len}
    config = EngineConfig(device="cpu", row_family=asked, speculative=NGram(k=3), **sizes)
    assert (config.family, config.chain_family) == ("dot", chain)
    assert EngineConfig(device="cpu", row_family=asked, **sizes).family == (asked or "fma")


def test_a_cuda_device_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError) as refused:
        EngineConfig(device="cuda:1")
    assert str(refused.value) == "device='cuda:1', but torch finds no CUDA device"


def test_a_cuda_device_that_is_there_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert EngineConfig(device="cuda:1").device == "cuda:1"
    with pytest.raises(ValueError, match="device='cuda:2', but torch finds 2 CUDA devices"):
        EngineConfig(device="cuda:2")


def test_auto_leaves_the_dtype_to_the_checkpoint() -> None:
    assert EngineConfig(device="cpu", dtype="auto").torch_dtype is None


@pytest.mark.parametrize("name", list(DTYPES))
def test_a_dtype_may_be_named(name: str) -> None:
    named, given = EngineConfig(device="cpu", dtype=name), getattr(torch, name)
    assert named.torch_dtype is given
    assert EngineConfig(device="cpu", dtype=given).torch_dtype is given


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_every_power_of_two_is_a_block_size(block_size: int) -> None:
    assert EngineConfig(device="cpu", block_size=block_size).block_size == block_size


def test_engine_options_are_the_fields_of_the_config() -> None:
    """`from_pretrained(**options)` is typed by the one and reads the other."""
    assert get_type_hints(EngineOptions) == get_type_hints(EngineConfig)
    assert list(get_type_hints(EngineOptions)) == [
        field.name for field in dataclasses.fields(EngineConfig)
    ]
    assert not EngineOptions.__required_keys__


@pytest.mark.parametrize("documented", [SamplingParams, EngineConfig])
def test_every_field_is_documented(documented: Any) -> None:
    # A name that leaves no room beside it has a line of its own.
    described = re.findall(r"^ {4}(\w+)(?: {2,}\S|$)", documented.__doc__, flags=re.MULTILINE)
    assert described == [field.name for field in dataclasses.fields(documented)]


# The handle.


def test_a_new_request_waits_and_has_no_result() -> None:
    request = make_request([])
    assert request.phase is Phase.WAITING and not request.finished
    assert request.prompt_token_ids == (3, 1, 4)
    assert (request.job.max_new_tokens, request.job.min_len) == (16, 8)
    assert request.token_ids == [] and request.text == "" and request.pauses == 0
    with pytest.raises(ValueError) as refused:
        request.result()
    assert str(refused.value) == "request 7 is not finished: it is in waiting"


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE, Phase.PAUSED])
def test_a_running_request_has_no_result(phase: Phase) -> None:
    request = make_request([])
    request.phase = phase
    with pytest.raises(ValueError) as refused:
        request.result()
    assert str(refused.value) == f"request 7 is not finished: it is in {phase.value}"


def test_a_cancelled_request_has_no_result_before_the_engine_has_ended_it() -> None:
    cancelled: list[Request] = []
    request = make_request(cancelled)
    request.cancel()
    assert cancelled == [request] and request.finish_reason == "cancelled"
    assert not request.finished
    with pytest.raises(ValueError, match="request 7 is not finished"):
        request.result()
    request.phase = Phase.FINISHED
    assert request.result().finish_reason == "cancelled"


def test_cancelling_twice_counts_once() -> None:
    cancelled: list[Request] = []
    request = make_request(cancelled)
    request.cancel()
    request.cancel()
    assert cancelled == [request]


def test_cancelling_a_finished_request_changes_nothing() -> None:
    cancelled: list[Request] = []
    request = make_request(cancelled)
    request.phase, request.finish_reason = Phase.FINISHED, "stop"
    request.cancel()
    assert cancelled == [] and request.finish_reason == "stop"


def test_a_result_keeps_what_the_request_had() -> None:
    request = make_request([])
    request.job.stream = stream = TextStream(Tokenizer.from_directory(checkpoint_path()))
    request.job.tokens += [40, 41]
    stream.take([40, 41])
    request.phase, request.finish_reason = Phase.FINISHED, "length"
    result = request.result()
    request.job.tokens.append(1)
    assert (result.request_id, result.seed, result.finish_reason) == (7, 99, "length")
    assert result.prompt_token_ids == (3, 1, 4)
    assert (result.token_ids, result.text) == ((40, 41), "HI")
    assert result.timings is request.timings


def test_a_request_prints_what_helps() -> None:
    assert repr(make_request([])) == (
        "Request(id=7, phase=waiting, prompt=3, tokens=0, finish_reason=None)"
    )


def test_a_request_without_a_slot_has_no_placement() -> None:
    with pytest.raises(AssertionError, match="holds no slot"):
        make_request([]).job.placed  # noqa: B018  (the property raises)


def test_timings() -> None:
    timings = Timings(submitted=1.0)
    assert timings.time_to_first_token is None and timings.inter_token == []
    timings.tokens += [3.0, 3.5, 4.25]
    assert timings.time_to_first_token == 2.0
    assert timings.inter_token == [0.5, 0.75]


def test_an_event_is_frozen() -> None:
    event = Event(request=make_request([]), token_ids=(1,), text="a", finish_reason=None, time=2.0)
    with pytest.raises(AttributeError):
        event.text = "b"  # type: ignore[misc]
