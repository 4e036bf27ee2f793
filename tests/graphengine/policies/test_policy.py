"""Policies against transformers: prefixes of images and text, seeds, fixed actions, and errors."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.policies import IMAGE, save_policy
from graphengine import Engine, Policy, PromptParts
from graphengine.buckets import StaticBuffers
from graphengine.models.policies import read_policy_config
from graphengine.policies.action_step import ActionStep

WIDTH = 56
TOKENS_OF_IMAGE = 16
with warnings.catch_warnings():
    # Torch means to drop both kinds of tensors; callers may have them until then.
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor([torch.zeros(2, WIDTH), torch.zeros(3, WIDTH)])
    QUANTISED = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_prefix": 90, "prefix_buckets": [20, 40, 90]}


class Oracle:
    """A policy of transformers and its folder."""

    def __init__(self, path: Path, **changes: Any) -> None:
        self.path, self.model = path, save_policy(path, **changes)

    def inputs(self, cameras: int, text: Sequence[int]) -> dict[str, Tensor]:
        dice = torch.Generator().manual_seed(len(text))
        ids = [IMAGE] * TOKENS_OF_IMAGE * cameras + [*text]
        return {
            "input_ids": torch.tensor([ids]),
            "pixel_values": torch.randn(1, max(cameras, 1), 3, 32, 32, generator=dice),
            "pixel_attention_mask": torch.ones(1, max(cameras, 1), dtype=torch.bool),
        }

    def embeds(self, inputs: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return self.model.model.embed_prefix(**inputs)[0]

    def acts(
        self, inputs: dict[str, Tensor], state: Tensor, noise: Tensor, steps: int | None = None
    ) -> Tensor:
        with torch.no_grad():
            return self.model.sample_actions(
                state=state[None],
                noise=noise[None].clone(),
                attention_mask=torch.ones_like(inputs["input_ids"]),
                num_steps=steps,
                **inputs,
            )[0]

    def acts_beside(
        self, inputs: dict[str, Tensor], state: Tensor, noise: Tensor, fixed: Tensor
    ) -> Tensor:
        """`acts`, where the first rows are on their straight path before each step."""
        x, held, steps = noise.clone(), len(fixed), self.model.config.num_inference_steps
        mask = torch.ones_like(inputs["input_ids"])
        with torch.no_grad():
            cache = self.model.model.vlm(
                inputs_embeds=self.model.model.embed_prefix(**inputs),
                attention_mask=mask,
                position_ids=mask.cumsum(-1) - 1,
                token_type_ids=torch.zeros_like(mask),
                use_cache=True,
            ).past_key_values
            length = cache.get_seq_length()
            for step in range(steps):
                time = 1 - step / steps
                x[:held] = time * noise[:held] + (1 - time) * fixed
                found = self.model(
                    state=state[None],
                    noise=x[None],
                    timestep=torch.tensor([time]),
                    attention_mask=mask,
                    past_key_values=cache,
                )
                cache.crop(length - cache.get_seq_length())
                x = x - found.logits[0] / steps
        x[:held] = fixed
        return x


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("pi0"))


@pytest.fixture(scope="module")
def policy(oracle: Oracle) -> Iterator[Policy]:
    with Policy.from_pretrained(oracle.path, device="cpu", **OPTIONS) as opened:
        yield opened


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("steps", [None, 1, 10])
def test_actions_are_those_of_transformers(oracle: Oracle, device: str, steps: int | None) -> None:
    """Images and text, text alone, an image alone; prefixes that fill a bucket and that do not."""
    state, noise = drawn(5), drawn(7, 6, seed=2)
    with Policy.from_pretrained(oracle.path, device=device, steps=steps, **OPTIONS) as policy:
        assert policy.steps == (3 if steps is None else steps)
        for cameras, text in ((2, [5, 17, 8]), (0, [9]), (1, [5, 6, 7, 8]), (1, []), (4, [9] * 26)):
            inputs = oracle.inputs(cameras, text)
            wanted = oracle.acts(inputs, state, noise, steps)
            images = oracle.embeds(inputs)[: cameras * TOKENS_OF_IMAGE]
            found = policy.act(PromptParts(images, text), state, noise=noise)
            assert found.shape == (7, 6) and found.dtype == torch.float32
            assert_close(found, wanted)


@pytest.mark.parametrize(
    "changes",
    [
        {"text": {"num_key_value_heads": 2}, "expert": {"num_key_value_heads": 2}},
        {"text": {"num_attention_heads": 2}, "chunk_size": 1, "min_period": 0.1},
        {"expert": {"hidden_size": 24, "num_attention_heads": 3}, "max_action_dim": 33},
        {"text": {"num_hidden_layers": 1}, "expert": {"num_hidden_layers": 1}, "max_state_dim": 1},
        # More actions than the kernels of decode take.
        {"chunk_size": 65},
    ],
)
def test_other_sizes(tmp_path: Path, device: str, changes: dict[str, Any]) -> None:
    oracle = Oracle(tmp_path, **changes)
    config = oracle.model.config
    state, noise = drawn(config.max_state_dim), drawn(config.chunk_size, config.max_action_dim)
    inputs = oracle.inputs(1, [7, 8])
    wanted = oracle.acts(inputs, state, noise)
    with Policy.from_pretrained(tmp_path, device=device, **OPTIONS) as policy:
        assert_close(policy.act(oracle.embeds(inputs), state, noise=noise), wanted)


def test_all_positions_see_each_other_and_the_state(policy: Policy) -> None:
    """Each change of the prefix's first or last position, or of the state, changes all actions."""
    ids, state, noise = [*range(5, 30)], drawn(5), drawn(7, 6)
    usual = policy.act(ids, state, noise=noise).clone()
    for changed, value in (([4, *ids[1:]], state), ([*ids[:-1], 4], state), (ids, state + 1)):
        found = policy.act(changed, value, noise=noise)
        assert (found != usual).any(dim=1).all()


def test_earlier_prefixes_leave_nothing_behind(oracle: Oracle, policy: Policy) -> None:
    """After a longer prefix with other arguments, bits are those of a policy just opened."""
    state, short = drawn(3), [*range(5, 12)]
    policy.act(drawn(90, WIDTH) * 1e4, drawn(5), seed=3, fixed=drawn(4, 6), noise=drawn(7, 6))
    found = policy.act(short, state, seed=11).clone()
    with Policy.from_pretrained(oracle.path, device="cpu", **OPTIONS) as fresh:
        assert torch.equal(fresh.act(short, state, seed=11), found)


def test_positions_past_a_prefix_may_hold_anything(policy: Policy) -> None:
    """Padded lanes, their embeddings, and KV past the sequence are not read."""
    ids, state = [*range(5, 12)], drawn(5)
    usual = policy.act(ids, state).clone()
    held = policy._step
    held.cache.fill_(torch.nan)
    policy._buffers["embeds"].fill_(torch.nan)
    assert torch.equal(policy.act(ids, state), usual)
    held.cache.zero_()


def test_a_chunk_is_a_function_of_its_seed(policy: Policy) -> None:
    ids, state = [5, 6, 7], drawn(5)
    first = policy.act(ids, state, seed=-4).clone()
    other = policy.act(ids, state, seed=-3).clone()
    assert torch.equal(policy.act(ids, state, seed=-4), first)
    assert (first != other).all()
    # All 64 bits count.
    high = policy.act(ids, state, seed=-4 % 2**32)
    assert (first != high).all()
    policy.act(ids, state, seed=-4)
    # The noise of a seed is what is given in its place.
    noise = policy._buffers["noise"].clone()
    assert torch.equal(policy.act(ids, state, seed=9, noise=noise), first)


def test_fixed_actions_are_kept_and_change_the_others(oracle: Oracle, policy: Policy) -> None:
    ids, state, noise = [5, 6, 7], drawn(5), drawn(7, 6)
    usual = policy.act(ids, state, noise=noise).clone()
    held = 3 * drawn(2, 6, seed=8)
    found = policy.act(ids, state, noise=noise, fixed=held).clone()
    assert torch.equal(found[:2], held)
    assert (found[2:] != usual[2:]).any(dim=1).all()
    assert_close(found, oracle.acts_beside(oracle.inputs(0, ids), state, noise, held))
    assert policy.act(ids, state, noise=noise, fixed=drawn(0, 6)).equal(usual)
    narrow = policy.act(ids, state, noise=noise, fixed=held[:, :2])
    assert torch.equal(narrow[:2], torch.nn.functional.pad(held[:, :2], (0, 4)))
    whole = drawn(7, 6, seed=9)
    assert torch.equal(policy.act(ids, state, noise=noise, fixed=whole), whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefix": [5] * 91}, "91"),
        ({"prefix": PromptParts(torch.zeros(80, WIDTH), [5] * 11)}, r"91 positions.*max_prefix=90"),
        ({"prefix": PromptParts(torch.zeros(0, WIDTH), [])}, "the prefix is empty"),
        (
            {"prefix": torch.zeros(3, 7)},
            rf"shape \[3, 7\] .*: the model takes \[n, {WIDTH}\]",
        ),
        ({"prefix": [120]}, "token id 120 is outside the vocabulary of 120"),
        ({"prefix": "text"}, "no tokenizer"),
        ({"state": torch.zeros(6)}, r"state must have up to 5 values, not \[6\]"),
        ({"state": torch.zeros(1, 5)}, r"state must have up to 5 values, not \[1, 5\]"),
        ({"state": [float("nan")]}, "state has values that are not finite"),
        ({"seed": 1.5}, "seed=1.5 must be an integer of 64 bits"),
        ({"seed": 2**63}, "seed=9223372036854775808 must be"),
        ({"noise": torch.zeros(6, 7)}, r"noise must be \[7, 6\], not \[6, 7\]"),
        ({"fixed": torch.zeros(8, 6)}, r"n up to 7 and d up to 6, not \[8, 6\]"),
        ({"fixed": torch.zeros(1, 7)}, r"n up to 7 and d up to 6, not \[1, 7\]"),
        ({"fixed": torch.full((1, 6), torch.inf)}, "fixed has values that are not finite"),
        ({"noise": torch.full((7, 6), torch.nan)}, "noise has values that are not finite"),
        ({"prefix": torch.full((3, WIDTH), torch.nan)}, "row 0 is not finite in torch.float32"),
        (
            {"prefix": torch.eye(WIDTH).to_sparse()},
            "have the layout torch.sparse_coo: they",
        ),
        (
            {"prefix": torch.zeros(3, WIDTH, device="meta")},
            "on meta have no values",
        ),
        ({"state": None}, "state must be numbers, not None"),
        ({"state": "ab"}, "state must be numbers, not 'ab'"),
        (
            {"state": torch.zeros(2, dtype=torch.complex64)},
            "state must be real numbers, not tor",
        ),
        ({"fixed": [["a"]]}, "fixed must be numbers"),
        ({"fixed": np.array([["a"]])}, r"fixed must be numbers, not array\(.* of <U1"),
        ({"state": torch.zeros(2, device="meta")}, "state must be dense, with values, not a ten"),
        ({"state": NESTED}, "state must be dense, with values, not a nested tensor of"),
        ({"prefix": NESTED}, "embeddings in a prompt are a nested tensor"),
        ({"prefix": torch.tensor(5)}, r"of shape \[\] and torch.int64 .* token ids are one list"),
        ({"state": QUANTISED}, "not a quantised tensor of torch.strided and torch.qint8"),
    ],
)
def test_arguments_that_do_not_fit(policy: Policy, arguments: dict[str, Any], message: str) -> None:
    usual = policy.act([5, 6], [1.0], seed=2).clone()
    with pytest.raises(ValueError, match=message):
        policy.act(**{"prefix": [5, 6], "state": [1.0]} | arguments)
    assert torch.equal(policy.act([5, 6], [1.0], seed=2), usual)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_prefix": 0}, r"max_prefix=0 must be an integer in \[1, "),
        ({"prefix_buckets": [40, 20, 90]}, r"\[40, 20, 90\] must rise and end with max_prefix=90"),
        ({"prefix_buckets": [20]}, r"\[20\] must rise and end with max_prefix=90"),
        ({"max_prefix": 512, "prefix_buckets": None}, "max_prefix=512, a state and 7 actions exce"),
        ({"steps": 0}, "steps=0 must be an integer"),
        ({"steps": 1001}, r"steps=1001 must be an integer in \[1, 1000\]"),
        ({"prefix_buckets": 5}, "prefix_buckets=5 must be a list"),
        ({"dtype": ["x"]}, "dtype=.*: must be one of float32"),
        ({"dtype": "int8"}, "dtype='int8': must be one of float32, bfloat16, float16"),
        ({"device": "tpu"}, "device='tpu'"),
    ],
)
def test_options_that_do_not_fit(oracle: Oracle, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy.from_pretrained(oracle.path, **{"device": "cpu", **OPTIONS} | options)


def test_lists_and_arrays_are_taken(policy: Policy) -> None:
    state, noise, held = drawn(5), drawn(7, 6), drawn(2, 6, seed=3)
    wanted = policy.act([5, 6], state, noise=noise, fixed=held).clone()
    for convert in (lambda tensor: tensor.numpy(), lambda tensor: tensor.tolist()):
        arguments = {"noise": convert(noise), "fixed": convert(held)}
        assert torch.equal(policy.act([5, 6], convert(state), **arguments), wanted)


def test_arrays_of_any_strides_and_byte_order_are_taken(policy: Policy) -> None:
    """As messages of robots have them: read-only, turned around, of the network's byte order."""
    state, noise, held = drawn(5), drawn(7, 6), drawn(2, 6, seed=3)
    wanted = policy.act([5, 6], state, noise=noise, fixed=held).clone()
    received = np.frombuffer(state.numpy().astype(">f4").tobytes(), dtype=">f4")
    turned = noise.flip(0).numpy()[::-1]
    wide = held.numpy().astype(np.longdouble)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = policy.act([5, 6], received, noise=turned, fixed=wide)
    assert torch.equal(found, wanted)


def test_embeddings_leave_their_history_behind(policy: Policy) -> None:
    """A tower that was called without `no_grad`: nothing of it is kept."""
    rows = torch.nn.Linear(3, WIDTH)(torch.ones(4, 3))
    assert rows.requires_grad
    found = policy.act(rows, drawn(5))
    assert not found.requires_grad and not policy._buffers["embeds"].requires_grad


def test_a_call_that_fails_is_followed_by_others(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it fails, and more often than there are staging blocks."""
    wanted = policy.act([5, 6], [1.0], seed=2).clone()

    def fails(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for place, name in ((StaticBuffers, "load"), (type(policy._ladder), "pick")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fails)
            for _ in range(3):
                with pytest.raises(KeyboardInterrupt):
                    policy.act([5], [2.0])
        assert torch.equal(policy.act([5, 6], [1.0], seed=2), wanted)


def test_values_beyond_the_dtype(oracle: Oracle) -> None:
    options = OPTIONS | {"dtype": "float16"}
    with Policy.from_pretrained(oracle.path, device="cpu", **options) as policy:
        for arguments in ({"state": [7e4]}, {"prefix": torch.full((1, WIDTH), 7e4)}):
            with pytest.raises(ValueError, match=r"not finite in torch.float16"):
                policy.act(**{"prefix": [5], "state": [1.0]} | arguments)


def test_another_thread_is_refused(policy: Policy) -> None:
    policy.act([5], [1.0])
    with ThreadPoolExecutor(1) as pool:
        for call in (pool.submit(policy.act, [5], [1.0]), pool.submit(policy.close)):
            with pytest.raises(RuntimeError, match="but thread 'MainThread' uses this policy"):
                call.result()
    assert policy.act([5], [1.0]).isfinite().all()


def test_a_pool_may_open_it_and_try_it(oracle: Oracle) -> None:
    """Its thread owns the policy until it has ended."""

    def warmed_up() -> Policy:
        opened = Policy.from_pretrained(oracle.path, device="cpu", **OPTIONS)
        opened.act([5], [1.0])
        return opened

    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(warmed_up).result()
        with pytest.raises(RuntimeError, match="called from thread 'MainThread', but thread"):
            opened.act([5], [1.0])
    with opened:
        assert opened.act([5], [1.0]).isfinite().all()


def test_a_closed_policy_says_so(oracle: Oracle) -> None:
    policy = Policy.from_pretrained(oracle.path, device="cpu", **OPTIONS)
    policy.close()
    policy.close()
    with pytest.raises(ValueError, match="the policy is closed"):
        policy.act([5], [])


def test_half_the_buckets_by_default(oracle: Oracle) -> None:
    options = OPTIONS | {"prefix_buckets": None, "max_prefix": 300}
    with Policy.from_pretrained(oracle.path, device="cpu", **options) as policy:
        assert policy.prefix_buckets == (75, 150, 300)
        assert policy.max_prefix == 300


def test_the_longest_prefix_leaves_room_for_state_and_actions(oracle: Oracle) -> None:
    """512 positions are 504 of a prefix, a state and 7 actions."""
    options = OPTIONS | {"max_prefix": 504, "prefix_buckets": [504]}
    with Policy.from_pretrained(oracle.path, device="cpu", **options) as policy:
        assert policy.act([5] * 504, [1.0]).isfinite().all()
    with pytest.raises(ValueError, match="max_prefix=505, a state and 7 actions exceed the 512"):
        Policy.from_pretrained(
            oracle.path, device="cpu", **options | {"max_prefix": 505, "prefix_buckets": [505]}
        )


def test_names_of_transformers_own_modules(oracle: Oracle, policy: Policy, tmp_path: Path) -> None:
    """A state dict of transformers, under the names of its own modules."""
    (tmp_path / "config.json").write_text((oracle.path / "config.json").read_text())
    save_file(
        {name: tensor.contiguous() for name, tensor in oracle.model.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    wanted = policy.act([5, 6], [1.0]).clone()
    with Policy.from_pretrained(tmp_path, device="cpu", **OPTIONS) as opened:
        assert torch.equal(opened.act([5, 6], [1.0]), wanted)


def test_a_config_of_lerobot(tmp_path: Path) -> None:
    """It names both models by their sizes; the tensors decide whether they fit."""
    config = {"type": "pi0", "paligemma_variant": "gemma_300m", "chunk_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"state_proj.bias": torch.zeros(1024)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="lacks 336 of 337 tensors"):
        Policy.from_pretrained(tmp_path, device="cpu", max_prefix=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "`Engine` opens language"),
        ({"type": "pi0", "paligemma_variant": "gemma_9b"}, "paligemma_variant='gemma_9b'"),
        ({"vlm_config": 3}, "vlm_config=3: supported: a JSON object"),
        ({"vlm_config": {"model_type": "llava"}}, "vlm_config.model_type='llava'"),
        ({"vlm_config": {"text_config": 3}}, "vlm_config.text_config=3"),
        ({"dit_config": {"model_type": "llama"}}, "dit_config.model_type='llama'"),
        ({"dit_config": {"use_bidirectional_attention": False}}, "supported: null or true"),
        ({"dit_config": {"head_dim": 16}}, "layers, KV heads and head_dim must be the same"),
        ({"chunk_size": 0}, r"chunk_size=0: must be an integer in \[1, "),
        (
            {"num_inference_steps": 1001},
            r"num_inference_steps=1001: must be an integer in \[1, 1000",
        ),
        ({"min_period": 1e-40}, "min_period=1e-40: must be a finite number in"),
        ({"dit_config": {"hidden_size": 45}}, "dit_config.hidden_size=45: supported: an even"),
        ({"min_period": -1}, "min_period=-1: must be a finite number in"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
    ],
)
def test_configs_that_are_not_supported(
    oracle: Oracle, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = json.loads((oracle.path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    (tmp_path / "model.safetensors").symlink_to(oracle.path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        Policy.from_pretrained(tmp_path, device="cpu", **OPTIONS)


def test_engines_and_policies_name_each_other(oracle: Oracle) -> None:
    with pytest.raises(ValueError, match="a robot's policy: `Policy` opens it, not `Engine`"):
        Engine.from_pretrained(str(oracle.path), device="cpu")
    with pytest.raises(ValueError, match="has type='pi05': supported: 'pi0'; `Engine`"):
        read_policy_config({"type": "pi05"})


def test_the_older_name_of_the_steps() -> None:
    """LeRobot's `num_steps`, where `num_inference_steps` does not say otherwise."""
    for config, steps in (
        ({"num_steps": 4}, 4),
        ({"num_steps": 4, "num_inference_steps": 6}, 6),
        ({}, 10),
    ):
        assert read_policy_config({"type": "pi0", **config}).steps == steps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state_proj.weight": None}, "state_proj.weight"),
        ({"state_proj.weight": torch.zeros(44, 6)}, r"state_proj.weight"),
        ({"adaln.weight": torch.zeros(3)}, "1 tensors that no part of this policy reads: adaln"),
        ({"embed_action_time.state_proj.bias": torch.zeros(44)}, "state_proj.bias twice"),
    ],
)
def test_tensors_that_do_not_fit(
    oracle: Oracle, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    tensors: dict[str, Any] = load_file(oracle.path / "model.safetensors") | change
    (tmp_path / "config.json").write_text((oracle.path / "config.json").read_text())
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        Policy.from_pretrained(tmp_path, device="cpu", **OPTIONS)


@pytest.mark.parametrize("fault", ["time", "causal", "state"])
def test_planted_faults_are_seen(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A time of the step after, actions that see only earlier ones, a state that sees actions."""
    state, noise, inputs = drawn(5), drawn(7, 6), oracle.inputs(1, [7])
    wanted = oracle.acts(inputs, state, noise)
    if fault == "time":
        embedded = ActionStep._embedded_times
        monkeypatch.setattr(ActionStep, "_embedded_times", lambda step: embedded(step)[::-1])
    with Policy.from_pretrained(oracle.path, device="cpu", **OPTIONS) as policy:
        load = StaticBuffers.load

        def faulty(held: Any, updates: dict[str, Any], *, sequence: int) -> Any:
            length = updates["state_seen"][0]
            if fault == "causal":
                updates = updates | {"action_seen": [length + 1 + row for row in range(7)]}
            if fault == "state":
                updates = updates | {"state_seen": [length + 7]}
            return load(held, updates, sequence=sequence)

        # KV of an earlier chunk is there to be seen.
        policy.act(oracle.embeds(inputs), state, seed=1)
        monkeypatch.setattr(StaticBuffers, "load", faulty)
        found = policy.act(oracle.embeds(inputs), state, noise=noise)
        with pytest.raises(AssertionError):
            assert_close(found, wanted)
