"""Draft modules against their formulae in plain PyTorch: decode, prefill, chains of both.

What a module is fed is made here by plain functions, so that only its own kernels are under test.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.mtp_modules import (
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYOUTS,
    VOCAB,
    Module,
    random_tensors,
    write_random,
)
from demo_training.checkpoint import load_model
from demo_training.model import DEPTH
from graphengine import Engine, SamplingParams
from graphengine.demo import checkpoint_path, heldout_text
from graphengine.drafters.mtp.layer import (
    MtpConfig,
    MtpWeights,
    allocate_mtp_weights,
    mtp_decode,
    mtp_prefill,
)
from graphengine.drafters.mtp.reading import read_mtp_config
from graphengine.kernels.attention.prefill import paged_prefill_attention
from graphengine.kernels.linear.epilogues import STORE
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.plans import RowFamily
from graphengine.kernels.linear.residual import Residual, new_residual
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes, gather_prefill
from graphengine.models.blocks import gqa
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.families.registry import read_model_config
from graphengine.models.launches import DecodeLaunch
from graphengine.models.plans.choosing import choose_plans
from graphengine.models.states import StateTensors, cache_shape
from graphengine.text.tokenizer import Tokenizer

TOLERANCE = 1e-4
"""Tolerance of float32 hidden states and logits, relative to the largest."""

MAX_SEQ_LEN, BLOCK, SLOTS = 64, 8, 3


def assert_close(actual: Tensor, expected: Tensor) -> None:
    error = (actual.cpu() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE, f"{error=}"


class Row(NamedTuple):
    """A lane of a decode launch: what it feeds, and for whom."""

    slot: int
    token: int
    position: int
    hidden: Tensor


class Drafter:
    """A checkpoint's target and modules, with a cache that is NaN wherever nobody wrote."""

    def __init__(self, path: Path, device: str = "cpu") -> None:
        checkpoint = Checkpoint.open(path)
        target = read_model_config(checkpoint.config)
        self.device = torch.device(device)
        self.config: MtpConfig = read_mtp_config(checkpoint)
        self.weights: MtpWeights = allocate_mtp_weights(
            self.config, device=device, dtype=torch.float32
        )
        weights = target.allocate(device=device, dtype=torch.float32)
        checkpoint.load(weights.named() | self.weights.named())
        self.model = weights.open(max_seq_len=MAX_SEQ_LEN)
        blocks = MAX_SEQ_LEN // BLOCK
        order = torch.randperm(SLOTS * blocks, generator=torch.Generator().manual_seed(1)) + 1
        self.block_table = order.to(self.device, torch.int32).view(SLOTS, blocks)
        shape = (SLOTS * blocks + 1, *cache_shape(target.states, BLOCK)[1:])
        self.cache = self._nan(target.num_layers, *shape)
        self.module_cache = self._nan(self.config.modules, *shape)
        self.tables = self.model.tables

    def _nan(self, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, device=self.device)

    def _int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def launch(self, family: RowFamily) -> DecodeLaunch:
        plans, _ = choose_plans(self.config.linears(), torch.float32, family, self.device)
        arrivals = torch.zeros(4096, dtype=torch.int32, device=self.device)
        return DecodeLaunch(plans=plans, split_tokens=64, arrivals=arrivals)

    def combine(self, module: int, token_N: Tensor, hidden_NH: Tensor) -> Tensor:
        weights, embedding = self.weights.modules[module], self.model.weights.embedding
        normed = partial(F.rms_norm, normalized_shape=hidden_NH.shape[1:], eps=self.config.norm_eps)
        halves = [
            normed(embedding[token_N.long()], weight=weights.embedding_norm),
            normed(hidden_NH, weight=weights.hidden_norm),
        ]
        return torch.cat(halves[::-1] if self.config.hidden_first else halves, dim=1)

    def decode(
        self, module: int, rows: list[Row | None], family: RowFamily
    ) -> tuple[Tensor, Tensor]:
        """u `[N, H]` and logits `[N, V]` of the rows; None is a padded lane, whose data is NaN."""
        H, lanes = self.config.hidden_size, len(rows)
        combined, residual = self._nan(lanes, 2 * H), new_residual(
            lanes, H, 1, dtype=torch.float32, device=self.device
        )  # fmt: skip
        for part in residual[:3]:
            part.fill_(torch.nan)
        row = DecodeLanes(*(self._int32([-1 if name == "slot" else 2**30] * lanes)
                            for name in DecodeLanes._fields))  # fmt: skip
        for lane, live in enumerate(rows):
            if live is not None:
                row.token[lane], row.slot[lane], row.position[lane] = (
                    live.token, live.slot, live.position
                )  # fmt: skip
                hidden = live.hidden[None].to(self.device)
                combined[lane] = self.combine(module, row.token[lane : lane + 1], hidden)[0]
                residual.x[lane] = 0
        launch = self.launch(family)
        end = mtp_decode(
            self.weights.modules[module],
            combined,
            residual,
            row,
            self.module_cache[module],
            self.block_table,
            self.tables,
            launch,
        )
        return self._output(end), self._logits(end, row.slot, launch)

    def _output(self, end: Residual) -> Tensor:
        mean = end.squares.sum(0) / end.x.shape[1]
        return end.scaled * torch.rsqrt(mean + self.config.norm_eps)[:, None]

    def _logits(self, end: Residual, slot_N: Tensor, launch: DecodeLaunch) -> Tensor:
        head, eps = self.model.weights.lm_head, self.config.norm_eps
        return linear(launch.call("lm_head", end, head, slot_N, eps=eps), STORE)

    def chunk(self, slot: int, start: int, tokens: list[int], size: int) -> PrefillLanes:
        """`tokens` in a bucket of `size`, whose other lanes hold no token of the vocabulary."""
        padded = self._int32(tokens + [2**30] * (size - len(tokens)))
        return gather_prefill(padded, *(self._int32([x]) for x in (slot, start, len(tokens))))

    def attend(self, slot: int, start: int, chunk: PrefillLanes) -> Any:
        return partial(
            paged_prefill_attention,
            block_table_SB=self.block_table,
            query_start_P1=chunk.query_start,
            slot_P=self._int32([slot]),
            position_P=self._int32([start]),
        )

    def prefill(
        self, module: int, slot: int, start: int, tokens: list[int], hidden_TH: Tensor, size: int
    ) -> Tensor:
        """u `[T, H]` of a chunk in a bucket of `size`."""
        chunk, count = self.chunk(slot, start, tokens, size), len(tokens)
        combined = self._nan(size, 2 * hidden_TH.shape[1])
        combined[:count] = self.combine(
            module, self._int32(tokens), hidden_TH[:count].to(self.device)
        )
        u = mtp_prefill(
            self.config,
            self.weights.modules[module],
            combined,
            chunk,
            self.module_cache[module],
            self.block_table,
            self.tables,
            self.attend(slot, start, chunk),
        )
        assert u.shape == (size, hidden_TH.shape[1])
        return u[:count]


@pytest.fixture(params=LAYOUTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def random_inputs(seed: int, length: int) -> tuple[list[int], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
    return tokens, torch.randn(length, HIDDEN, generator=generator)


def oracle(name: str, module: int) -> Module:
    layout = LAYOUTS[name]
    return Module(layout, random_tensors(layout), layout.prefixes[module])


def last_module(name: str) -> int:
    return len(LAYOUTS[name].prefixes) - 1


# Random checkpoints of each layout.


@pytest.mark.parametrize("family", ["fma", "dot"])
def test_decode_one_token_at_a_time(
    tmp_path: Path, device: str, name: str, family: RowFamily
) -> None:
    drafter, module = Drafter(write_random(tmp_path, name), device), last_module(name)
    # In `dot` two requests, of which one starts later, with a padded lane between them.
    first_steps = {1: 0} if family == "fma" else {2: 0, 0: 5}
    inputs = {slot: random_inputs(slot, 21) for slot in first_steps}
    oracles = {slot: oracle(name, module) for slot in first_steps}
    for step in range(21):
        live = [
            Row(slot, inputs[slot][0][step], step - first, inputs[slot][1][step])
            for slot, first in first_steps.items()
            if step >= first
        ]
        rows = [live[0], None, *live[1:]]
        u, logits = drafter.decode(module, rows, family)
        for lane, row in enumerate(rows):
            if row is not None:
                expected = oracles[row.slot].run(row.token, row.hidden, row.position)
                assert_close(u[lane], expected)
                assert_close(logits[lane], oracles[row.slot].logits(expected))


def test_prefill_in_chunks_and_decode_after_it(tmp_path: Path, device: str, name: str) -> None:
    drafter, slot = Drafter(write_random(tmp_path, name), device), 1
    tokens, hidden = random_inputs(7, 24)
    for module in range(len(LAYOUTS[name].prefixes)):
        plain = oracle(name, module)
        expected = torch.stack([plain.run(tokens[p], hidden[p], p) for p in range(24)])
        got = [
            drafter.prefill(module, slot, start, tokens[start:end], hidden[start:end], 8)
            for start, end in ((0, 8), (8, 16), (16, 19))
        ]
        for position in range(19, 24):
            row = Row(slot, tokens[position], position, hidden[position])
            got.append(drafter.decode(module, [row], "dot")[0])
        assert_close(torch.cat(got), expected)


def test_garbage_of_an_earlier_run_is_overwritten(tmp_path: Path, name: str) -> None:
    """A chain runs ahead of what is accepted; the next step's rows take its places."""
    drafter, plain = Drafter(write_random(tmp_path, name)), oracle(name, 0)
    tokens, hidden = random_inputs(3, 12)
    other, noise = random_inputs(4, 12)
    for position in range(6):
        plain.run(tokens[position], hidden[position], position)
    drafter.prefill(0, 0, 0, tokens[:6], hidden[:6], 6)
    for position in range(6, 9):
        drafter.decode(0, [Row(0, other[position], position, noise[position])], "dot")
    for position in range(6, 9):
        u, _ = drafter.decode(0, [Row(0, tokens[position], position, hidden[position])], "dot")
        assert_close(u[0], plain.run(tokens[position], hidden[position], position))


def test_the_order_of_the_halves_and_the_module_matter(tmp_path: Path) -> None:
    """Check that the tests above would see a wrong one."""
    tokens, hidden = random_inputs(5, 1)
    name = "mimo"
    first, second = (oracle(name, module).run(tokens[0], hidden[0], 0) for module in (0, 1))
    drafter = Drafter(write_random(tmp_path, name))
    (u,), _ = drafter.decode(0, [Row(0, tokens[0], 0, hidden[0])], "fma")
    assert_close(u, first)
    assert (u - second).abs().max() > 0.1
    projection = drafter.weights.modules[0].projection
    projection.copy_(projection.roll(HIDDEN, dims=1))
    (swapped,), _ = drafter.decode(0, [Row(0, tokens[0], 0, hidden[0])], "fma")
    assert (swapped - first).abs().max() > 0.1


@pytest.mark.parametrize("tokens_per_row", [1, 2])
def test_attention_is_told_of_tokens_of_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens_per_row: int
) -> None:
    drafter = Drafter(write_random(tmp_path, "qwen3"))
    calls: list[dict[str, Any]] = []

    def attention(qkv: Tensor, *_: Any, **options: Any) -> Tensor:
        calls.append(options)
        return qkv[:, : HEADS * HEAD_DIM].contiguous()

    monkeypatch.setattr(gqa, "decode_attention", attention)
    launch = replace(drafter.launch("dot"), tokens_per_row=tokens_per_row)
    monkeypatch.setattr(drafter, "launch", lambda family: launch)
    drafter.decode(0, [Row(0, 1, 0, torch.ones(HIDDEN)), Row(0, 2, 1, torch.ones(HIDDEN))], "dot")
    (options,) = calls
    assert options.get("tokens_per_row", 1) == tokens_per_row


# The target's hidden states.


@pytest.mark.parametrize("count", [8, 5])
def test_prefill_of_all_lanes_leaves_the_logits_alone(
    tmp_path: Path, device: str, name: str, count: int
) -> None:
    drafter = Drafter(write_random(tmp_path, name), device)
    tokens, _ = random_inputs(2, count)
    results = []
    for all_lanes in (False, True):
        drafter.cache.fill_(torch.nan)
        chunk = drafter.chunk(1, 0, tokens, 8)
        end = drafter.model.prefill(
            chunk,
            StateTensors(drafter.cache, drafter.block_table),
            drafter.attend(1, 0, chunk),
            all_lanes=all_lanes,
        )
        logits = drafter.model.prefill_logits(end, chunk.slot[:1], head=drafter.model.lm_head)
        results.append((end, logits, drafter.cache.clone()))
    (plain, logits, cache), (end, same_logits, same_cache) = results
    assert plain.hidden is None and end.hidden is not None
    assert torch.equal(logits, same_logits)
    assert torch.equal(cache.nan_to_num(7), same_cache.nan_to_num(7))
    assert end.hidden.shape == (8, HIDDEN) and end.hidden.dtype == torch.float32
    # The last lane's is what its logits are made of.
    assert_close(end.hidden[count - 1] @ drafter.model.weights.lm_head.T, logits[0].cpu())


def test_a_layers_tensors_are_all_of_them() -> None:
    config = read_model_config(json.loads((checkpoint_path() / "config.json").read_text()))
    weights = config.allocate(device="meta", dtype=torch.bfloat16)
    for layer in weights.layers:
        # Two norms, q, k and v in one and two norms of them, output, gate and up in one, down.
        assert len(layer.tensors()) == 2 + 4 + 2
    # The embedding, which is also lm_head, and the final norm.
    assert len(weights.tensors()) == 2 + 8 * config.num_layers


# The demo checkpoint, against the model that it was trained as.


def test_the_demo_modules_chain_is_that_of_its_training(device: str) -> None:
    model = load_model(checkpoint_path())
    drafter = Drafter(checkpoint_path(), device)
    tokens = Tokenizer.from_directory(checkpoint_path()).encode(heldout_text())[500:533]
    text, following = tokens[:-1], tokens[1:]
    anchors = [2, 15, 28]
    with torch.no_grad():
        hidden = model.hidden(torch.tensor([text]))
        expected = model.drafts(hidden, torch.tensor([following]), torch.tensor(anchors))
        logits = [model.logits(u) for u in expected]

    # The target's hidden states, and step 0, in chunks of 16.
    outputs = []
    for slot, anchor in enumerate(anchors):
        rows, target_hidden = [], []
        for start in range(0, anchor + 1, 16):
            end = min(start + 16, anchor + 1)
            chunk = drafter.chunk(slot, start, text[start:end], 16)
            attend = drafter.attend(slot, start, chunk)
            found = drafter.model.prefill(
                chunk, StateTensors(drafter.cache, drafter.block_table), attend, all_lanes=True
            ).hidden
            assert found is not None
            target_hidden.append(found[: end - start])
            rows.append(
                drafter.prefill(0, slot, start, following[start:end], found[: end - start], 16)
            )
        assert_close(torch.cat(target_hidden), hidden[0, : anchor + 1])
        outputs.append(torch.cat(rows)[-1])
    u = torch.stack(outputs)
    assert_close(u, expected[0][0])

    for step in range(1, DEPTH):
        chain: list[Row | None] = [
            Row(slot, following[anchor + step], anchor + step, u[slot])
            for slot, anchor in enumerate(anchors)
        ]
        u, draft = drafter.decode(0, chain, "dot")
        assert_close(u, expected[step][0])
        assert_close(draft, logits[step][0])


# MiMo's target, end to end.


@pytest.mark.parametrize("max_batch", [1, 3])
def test_a_mimo_checkpoint_runs(tmp_path: Path, device: str, max_batch: int) -> None:
    """Beside its draft modules MiMo is Qwen2."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    }  # fmt: skip
    torch.manual_seed(0)
    config = Qwen2Config(**sizes, num_hidden_layers=2, tie_word_embeddings=False, eos_token_id=3)
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for tensor_name, parameter in model.named_parameters():
            scale = 0.3 if "norm" in tensor_name or "bias" in tensor_name else 0.15
            parameter.add_(torch.randn_like(parameter) * scale)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | LAYOUTS["mimo"].config))
    modules = {name: tensor for name, tensor in random_tensors(LAYOUTS["mimo"]).items()
               if "mtp_layers" in name}  # fmt: skip
    weights = tmp_path / "model.safetensors"
    save_file(load_file(weights) | modules, weights, metadata={"format": "pt"})

    assert read_mtp_config(Checkpoint.open(tmp_path)).modules == 2
    prompts = [random_inputs(length, length)[0] for length in (1, 9, 20)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    options: dict[str, Any] = {"max_batch": max_batch, "max_seq_len": 64, "block_size": 8}
    with Engine.from_pretrained(
        tmp_path, device=device, dtype="float32", prefill_buckets=(8, 32), **options
    ) as engine:
        results = engine.generate(prompts, params)
    for prompt, result in zip(prompts, results, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *result.token_ids]])).logits[0].float()
        chosen = logits[len(prompt) - 1 : -1]
        picked = chosen.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        near = TOLERANCE * chosen.abs().amax(1)
        assert (picked >= chosen.amax(1) - near).all()
