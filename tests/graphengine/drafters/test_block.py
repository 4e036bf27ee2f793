"""Block drafters: every draft is that of a plain forward of the same layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from checkpoints.block_drafters import (
    BlockShape,
    PlainDrafter,
    agreeing_tensors,
    block_config,
    block_tensors,
)
from checkpoints.eagle3_heads import Tensors, streams_of, write_head
from checkpoints.mtp_chains import SIZES, VOCAB
from engines.small_engine import assert_idle, greedy, sampled
from engines.speculation import ENDLESS, open_plain, open_speculating
from graphengine import DFlash, Engine, Request
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import sample_reference

K, LAYERS = 4, 8
SMALL: dict[str, Any] = {
    "max_batch": 3, "max_seq_len": 96, "block_size": 8, "prefill_buckets": (4, 16),
    "dtype": "float32",
}  # fmt: skip


class Pair(NamedTuple):
    """A target with a block drafter beside it, and the paths of both."""

    target: Any
    path: Path
    shape: BlockShape
    tensors: Tensors
    drafter_path: Path

    def drafter(self) -> PlainDrafter:
        model = self.target
        embedding = model.get_input_embeddings().weight.detach()
        return PlainDrafter(self.shape, self.tensors, embedding, model.lm_head.weight.detach())

    def mode(self, k: int = K) -> DFlash:
        return DFlash(self.drafter_path, k)


def llama() -> Any:
    """Its next token follows mostly from the last one; the mask's embedding is zero."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": LAYERS})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.05)
        model.model.embed_tokens.weight.mul_(6)
        model.model.embed_tokens.weight[BlockShape().mask] = 0
        model.lm_head.weight[BlockShape().mask] = 0
    return model


DFLASH, DSPARK = BlockShape(), BlockShape(layers=(6, 0), dspark=True, rank=16, block=7)
SHAPES = {
    "dflash": DFLASH,
    "dflash-windows": BlockShape(windows=(9, 0, 9)),
    "dflash-windows-both-ways": BlockShape(windows=(9, 9), causal=False),
    "dspark": DSPARK,
    "dspark-without-a-head": BlockShape(layers=(2,), windows=(0,), dspark=True),
}
AGREEING = {
    "dflash": BlockShape(),
    "dspark": BlockShape(layers=(1,), windows=(0,), dspark=True, rank=72),
}


def pair_of(folder: Path, target: Any, path: Path, shape: BlockShape, agrees: bool = False) -> Pair:
    embedding = target.get_input_embeddings().weight.detach()
    make = agreeing_tensors if agrees else block_tensors
    tensors = make(shape, embedding, target.lm_head.weight.detach())
    written = write_head(folder, block_config(shape, embedding, LAYERS), tensors)
    return Pair(target, path, shape, tensors, written)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder, target = tmp_path_factory.mktemp("block"), llama()
    path = folder / "target"
    target.save_pretrained(path)
    made = {name: pair_of(folder / name, target, path, shape) for name, shape in SHAPES.items()}
    for name, shape in AGREEING.items():
        named = f"{name}-agrees"
        made[named] = pair_of(folder / named, target, path, shape, agrees=True)
    return made


# The drafts.


class Follower:
    """A plain drafter that goes along with a request of an engine."""

    def __init__(self, pair: Pair, engine: Engine, request: Request) -> None:
        self.pair, self.engine, self.request = pair, engine, request
        self.drafter = pair.drafter()
        self.counts: list[int] = []

    def check(self, count: int, *, drafted: bool = True) -> None:
        """The drafts, where there are some, and the cache after a step of this many tokens."""
        request, pair = self.request, self.pair
        sequence = [*request.prompt_token_ids, *request.token_ids]
        streams = streams_of(pair.target, sequence[:-1], pair.shape.layers)
        self.check_cache(streams)
        if not drafted:
            return
        slot, limit = request.job.placed.slot, SMALL["max_seq_len"]
        drafts = self.engine.runtime.buffers["draft_tokens"][slot].tolist()
        width = min(pair.shape.width(len(drafts)), limit - len(streams))
        block = self.drafter.logits(streams, sequence[-1], width)
        made = width - (0 if pair.shape.dspark else 1)
        assert drafts[made:] == [-1] * (len(drafts) - made), f"{drafts=} past the limit"
        drafts = drafts[:made]
        logits = self.drafter.draft_logits(block, sequence[-1], drafts) if made else block[:0]
        for index, draft in enumerate(drafts):
            self.check_draft(draft, logits[index], len(sequence) + index, f"{index} of {drafts}")
        self.counts.append(count)

    def replace_drafts(self, following: list[int], right: int) -> None:
        """So many that are right, and then wrong ones."""
        drafts = self.engine.runtime.buffers["draft_tokens"][self.request.job.placed.slot]
        for index in range(len(drafts)):
            token = following[index] if index < len(following) else 1
            drafts[index] = token if index < right else (token + 1) % VOCAB

    def check_draft(self, draft: int, logits: torch.Tensor, position: int, which: str) -> None:
        """Greedily, or with the request's temperature and the noise of the draft's position."""
        temperature = self.request.params.temperature
        if temperature:
            params = SamplingTensors.neutral(1)
            params.temperature[0], params.seed[0] = temperature, self.request.params.seed
            ints = torch.tensor([0, position - 1], dtype=torch.int32)
            expected = int(sample_reference(logits[None], ints[:1], ints[1:], params))
            assert draft == expected, f"draft {which}, not {expected}"
            return
        near = 1e-4 * float(logits.abs().max())
        assert float(logits[draft]) >= float(logits.max()) - near, f"draft {which}"

    def check_cache(self, streams: torch.Tensor) -> None:
        """Of every verified position, in every layer."""
        engine, context = self.engine, self.drafter.context(streams)
        table = engine.runtime.buffers["block_table"][self.request.job.placed.slot]
        position = torch.arange(len(streams))
        for layer, kv in enumerate(engine.runtime.caches[1][0]):
            entries = kv[table[position // 8].long(), :, position % 8]
            expected = torch.stack(self.drafter.keys_and_values(layer, context, 0), dim=1)
            window = self.pair.shape.windows[layer]
            recent = slice(max(0, len(streams) - window) if window else 0, None)
            error = (entries - expected)[recent].abs().max() / expected.abs().max()
            assert error <= 1e-4, f"{layer=} {error=}"


def follow(
    pair: Pair,
    engine: Engine,
    requests: list[Request],
    known: Sequence[list[int]] = (),
    right: int = 0,
) -> list[Follower]:
    """Step the requests to their end, with a check after every step of each.

    known  the tokens of each, of which the next become the drafts: the first `right` of them
    """
    followers = [Follower(pair, engine, request) for request in requests]
    lengths = [0] * len(requests)
    while engine.busy:
        before = without_drafts(engine)
        engine.step()
        drafted = without_drafts(engine) == before
        for index, follower in enumerate(followers):
            request, count = requests[index], len(requests[index].token_ids) - lengths[index]
            lengths[index] += count
            if count and not request.finished and request in engine.scheduler.active:
                follower.check(count, drafted=drafted)
                if known:
                    follower.replace_drafts(known[index][lengths[index] :], right)
    return followers


def without_drafts(engine: Engine) -> int:
    """Steps that verified none, and made none."""
    names = [f"replays/decode/{rows}/fast" for rows in range(1, 1 + SMALL["max_batch"])]
    return sum(engine.counters[name] for name in names)


def prompts_of(length: int, *others: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randint(1, VOCAB - 1, (count,), generator=generator).tolist()
        for count in (length, *others)
    ]


PARAMS = [greedy(12, **ENDLESS), sampled(9, seed=5), greedy(8, **ENDLESS)]
"""Of three requests, whose prompts are of several chunks, of one token and of one chunk."""


@pytest.fixture(scope="module")
def known(pairs: dict[str, Pair]) -> list[list[int]]:
    """What these requests emit."""
    with open_plain(pairs["dflash"].path, **SMALL, device="cpu") as engine:
        return [list(result.token_ids) for result in engine.generate(prompts_of(21, 1, 6), PARAMS)]


@pytest.mark.parametrize("accepted", range(K + 1))
@pytest.mark.parametrize("name", SHAPES)
def test_drafts_are_those_of_a_plain_forward(
    pairs: dict[str, Pair], known: list[list[int]], name: str, accepted: int
) -> None:
    """After steps that accept each number of drafts, beside rows that go their own ways; greedily
    and with noise.
    """
    pair, options = pairs[name], SMALL | {"device": "cpu", "lookahead": 0}
    with open_speculating(pair.mode(), pair.path, **options) as engine:
        submitted = zip(prompts_of(21, 1, 6), PARAMS, strict=True)
        requests = [engine.submit(prompt, each) for prompt, each in submitted]
        followers = follow(pair, engine, requests, known, accepted)
        assert {1, 1 + accepted} <= {count for each in followers for count in each.counts}
        assert [request.token_ids for request in requests] == known
        assert_idle(engine)
