"""Block drafters: every draft is that of a plain forward of the same layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.block_drafters import (
    BlockShape,
    PlainDrafter,
    agreeing_tensors,
    block_config,
    block_tensors,
)
from checkpoints.eagle3_heads import Tensors, streams_of, write_head
from checkpoints.mtp_chains import SIZES, VOCAB, random_target
from engines.small_engine import assert_idle, greedy, sampled
from engines.speculation import ENDLESS, open_plain, open_speculating, random_jobs
from engines.stream_drafters import (
    IN_STEP,
    LAYERS,
    SMALL,
    check_gate,
    check_graphs,
    check_one_row,
    check_pauses,
    check_tokens,
    check_turns,
    follow,
    gemma3,
    hybrid,
    llama,
)
from engines.stream_drafters import prompts_of as prompts_below
from graphengine import DFlash, Engine, Request, SamplingParams
from graphengine.drafters import FieldSizes
from graphengine.drafters.block import drafter as block
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import sample_reference
from graphengine.speculative import describe
from launches.compilation import graph_kernels

K = 4
prompts_of = partial(prompts_below, below=VOCAB - 1)


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

    def follower(self, engine: Engine, request: Request) -> Follower:
        return Follower(self, engine, request)


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
    layers = target.config.num_hidden_layers
    written = write_head(folder, block_config(shape, embedding, layers), tensors)
    return Pair(target, path, shape, tensors, written)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder, target = tmp_path_factory.mktemp("block"), llama(BlockShape().mask)
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
        """Greedily, or with the request's temperature and filters, and the noise of the draft's
        position.
        """
        asked = self.request.params
        for token, bias in (asked.logit_bias or {}).items():
            logits[token] += bias
        if asked.temperature:
            params = SamplingTensors.neutral(1)
            params.temperature[0], params.seed[0] = asked.temperature, asked.seed
            params.top_k[0], params.top_p[0] = asked.top_k, asked.top_p
            ints = torch.tensor([0, position - 1], dtype=torch.int32)
            expected = int(sample_reference(logits[None], ints[:1], ints[1:], params))
            assert draft == expected, f"draft {which}, not {expected}"
            return
        near = 1e-4 * float(logits.abs().max())
        assert float(logits[draft]) >= float(logits.max()) - near, f"draft {which}"

    def check_cache(self, streams: torch.Tensor) -> None:
        """Compare every verified position, in every layer."""
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


PARAMS = [greedy(12, **ENDLESS), sampled(9, seed=5), greedy(8, **ENDLESS)]
"""Parameters of three requests, whose prompts are of several chunks, of one token and of one chunk.
"""


@pytest.fixture(scope="module")
def known(pairs: dict[str, Pair]) -> list[list[int]]:
    """What these requests emit."""
    with open_plain(pairs["dflash"].path, **SMALL, device="cpu") as engine:
        return [list(result.token_ids) for result in engine.generate(prompts_of(21, 1, 6), PARAMS)]


# Each number of drafts for the two that are published, and some for their kin.
COUNTS = [(name, count) for name in ("dflash", "dspark") for count in range(K + 1)]
COUNTS += [(name, count) for name in SHAPES for count in (0, 3) if (name, count) not in COUNTS]


@pytest.mark.parametrize(("name", "accepted"), COUNTS)
def test_drafts_are_those_of_a_plain_forward(
    pairs: dict[str, Pair], known: list[list[int]], name: str, accepted: int
) -> None:
    """After steps that accept each number of drafts, beside rows that go their own ways; greedily
    and with noise.
    """
    pair = pairs[name]

    def replace_drafts(index: int, follower: Follower) -> None:
        following = known[index][len(follower.request.token_ids) :]
        follower.replace_drafts(following, accepted)

    with open_speculating(pair.mode(), pair.path, **IN_STEP) as engine:
        submitted = zip(prompts_of(21, 1, 6), PARAMS, strict=True)
        requests = [engine.submit(prompt, each) for prompt, each in submitted]
        followers = follow(pair, engine, requests, replace_drafts)
        assert {1, 1 + accepted} <= {count for each in followers for count in each.counts}
        assert [request.token_ids for request in requests] == known
        assert_idle(engine)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_drafts_go_through_filters(pairs: dict[str, Pair], name: str) -> None:
    """A sequential head's drafts are filtered one after the other."""
    pair = pairs[name]
    asked = [
        sampled(9, seed=5, top_k=2, logit_bias={7: 3.0}),
        sampled(9, seed=6, top_p=0.5),
        greedy(9, logit_bias={7: 3.0}, **ENDLESS),
    ]
    prompts = prompts_of(21, 1, 6)
    with open_plain(pair.path, **SMALL, device="cpu") as engine:
        plain = [list(result.token_ids) for result in engine.generate(prompts, asked)]
    with open_speculating(pair.mode(), pair.path, **IN_STEP) as engine:
        requests = [engine.submit(*each) for each in zip(prompts, asked, strict=True)]
        follow(pair, engine, requests)
        assert [request.token_ids for request in requests] == plain


def test_up_to_the_last_position(pairs: dict[str, Pair]) -> None:
    """A block that would reach past the cache is shorter, and sees nothing that is not there."""
    for name in ("dflash", "dspark", "dflash-windows"):
        pair = pairs[name]
        with open_speculating(pair.mode(), pair.path, **IN_STEP) as engine:
            prompt = prompts_of(SMALL["max_seq_len"] - 7)[0]
            (follower,) = follow(pair, engine, [engine.submit(prompt, greedy(7, **ENDLESS))])
            assert len(follower.request.token_ids) == 7 and len(follower.counts) > 2


def test_after_pauses(pairs: dict[str, Pair]) -> None:
    check_pauses(pairs["dspark"], prompts_of(21, 9, 6), tokens=34, blocks=16)


def test_a_gate_leaves_the_drafter_warm(pairs: dict[str, Pair]) -> None:
    check_gate(pairs["dflash-windows"], prompts_of(21, 6), tokens=24, enough=4.0)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_turns_rewinds_and_snapshots(pairs: dict[str, Pair], tmp_path: Path, kv_dtype: str) -> None:
    check_turns(
        pairs["dspark-agrees"],
        pairs["dspark"],
        prompts_of(19, 5, 7),
        tmp_path,
        kv_dtype=kv_dtype,
        tokens=14,
        cached=32,
    )


def test_a_prefix_of_another_prompt(pairs: dict[str, Pair]) -> None:
    """Its drafter's blocks are those of the same tokens: not one token after them counts."""
    pair, (shared, *tails) = pairs["dflash"], prompts_of(24, 6, 9)
    with open_speculating(pair.mode(), pair.path, **IN_STEP, prefix_caching=True) as engine:
        for index, tail in enumerate(tails):
            request = engine.submit(shared + tail, greedy(6, **ENDLESS))
            follow(pair, engine, [request])
            assert request.cached_tokens == 24 * bool(index)


# A fault that no token shows.


def spoiled_draft(original: Any) -> Any:
    def commit(tiles: Any, lanes: Any, drafts: Any, **options: Any) -> Any:
        written = original(tiles, lanes, drafts, **options)
        if options.get("index", 1):
            drafts[:, 1:] = 7
        return written

    return commit


def stale_context(original: Any) -> Any:
    def keep(weights: Any, context: Any, slot: Any, *rest: Any) -> None:
        original(weights, context, torch.full_like(slot, -1), *rest)

    return keep


def one_position_off(original: Any) -> Any:
    def begin(*operands: Any, **options: Any) -> Any:
        begun = original(*operands, **options)
        begun.lanes.position.add_(1)
        return begun

    return begin


def of_half_the_block(original: Any) -> Any:
    def begin(*operands: Any, **options: Any) -> Any:
        begun = original(*operands, **options)
        begun.seen.sub_(2)
        return begun

    return begin


FAULTS = {
    "drafts": ("dflash", "commit_block_draft", spoiled_draft),
    "drafts one by one": ("dspark", "commit_draft", spoiled_draft),
    "no context": ("dflash", "keep_context", stale_context),
    "positions": ("dflash", "begin_block_draft", one_position_off),
    "half of a block": ("dspark", "begin_block_draft", of_half_the_block),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_no_plain_forward_s(
    monkeypatch: pytest.MonkeyPatch, pairs: dict[str, Pair], known: list[list[int]], fault: str
) -> None:
    name, function, spoil = FAULTS[fault]
    monkeypatch.setattr(block, function, spoil(getattr(block, function)))
    with pytest.raises(AssertionError, match=r"draft \d of \[|layer=\d error="):
        test_drafts_are_those_of_a_plain_forward(pairs, known, name, 2)


# Tokens.


@pytest.mark.parametrize("name", AGREEING)
def test_tokens_are_those_without(device: str, pairs: dict[str, Pair], name: str) -> None:
    least = 0.2 if name == "dflash" else 0.25
    check_tokens(pairs[f"{name}-agrees"], random_jobs(VOCAB - 1), device, least=least)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_drafts_go_through_biases(device: str, pairs: dict[str, Pair], name: str) -> None:
    """Where a bias decides each token, every draft is right, those of a sequential head, too."""
    params = sampled(20, seed=3, logit_bias={7: 1e4})
    with open_speculating(pairs[name].mode(), pairs[name].path, **SMALL, device=device) as engine:
        results = engine.generate(prompts_of(21, 6), params)
        assert [set(result.token_ids) for result in results] == [{7}, {7}]
        assert engine.acceptance.proposed > 0 and engine.acceptance.rate == 1.0


def test_a_stop_inside_drafts(pairs: dict[str, Pair], known: list[list[int]]) -> None:
    pair, prompt = pairs["dspark-agrees"], prompts_of(21, 1, 6)[0]
    with open_speculating(pair.mode(), pair.path, **SMALL, device="cpu") as engine:
        for index, token in enumerate(known[0]):
            if token in known[0][:index]:
                continue
            params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[token])
            (result,) = engine.generate([prompt], [params])
            assert list(result.token_ids) == known[0][: index + 1]
        assert engine.acceptance.accepted > 0


def test_one_row_of_few_lanes(pairs: dict[str, Pair]) -> None:
    pair = pairs["dspark-agrees"]
    check_one_row(pair, pair.mode(1), prompts_of(21, 4))


# What it holds and launches.


def test_what_it_holds_is_in_the_budget(pairs: dict[str, Pair]) -> None:
    for name in SHAPES:
        pair = pairs[name]
        with open_speculating(pair.mode(), pair.path, **SMALL, device="cpu") as engine:
            lines = {line.name: line.bytes for line in engine.memory.budget.lines}
            stored = load_file(pair.drafter_path / "model.safetensors")
            read = [tensor for key, tensor in stored.items() if "confidence" not in key]
            assert lines["drafter's weights"] == sum(tensor.nbytes for tensor in read)
            drafter = engine.core.drafter
            (streams,) = fields = drafter.fields(FieldSizes(3, 96, 16, torch.float32))
            assert streams.shape == (16, len(pair.shape.layers) * SIZES["hidden_size"])
            assert lines["drafter's state"] == sum(field.nbytes for field in fields)
            assert engine.core.description["speculative"] == describe(pair.mode())
            assert engine.runtime.caches[1][0].shape[0] == len(pair.shape.windows)
            assert drafter.needs.reserve == pair.shape.width(K)
        # A step's lanes may be more than a chunk's.
        assert drafter.fields(FieldSizes(9, 96, 16, torch.float32))[0].shape[0] == 9 * (1 + K)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_step_launches_no_kernel_that_copies(pairs: dict[str, Pair], name: str) -> None:
    """The target's five kernels a layer, and the block's in the same graph."""
    pair, options = pairs[name], SMALL | {"dtype": "bfloat16", "device": "cpu"}
    with open_speculating(pair.mode(), pair.path, **options) as engine:
        graphs = graph_kernels(engine)
    names = [kernel.name.lstrip("_") for kernel in graphs[f"decode/3/k{K}/fast"]]
    target, finish = 1 + 5 * LAYERS, 2
    context = ["dot_kernel", "rms_norm_kernel", *["dot_kernel", "rope_append_kernel"] * 2]
    layer = ["dot_kernel", "rope_append_kernel", "prefill_attention_kernel", *["dot_kernel"] * 3]
    ends = ["dot_kernel", "commit_block_kernel"]
    if name == "dspark":
        ends = ["dot_kernel", *["markov_kernel", "commit_kernel"] * K]
    assert names[target + finish :] == ["begin_block_kernel", *context, *layer * 2, *ends]


# Targets of other kinds.


TARGETS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "qwen3-windows": (lambda: random_target("qwen3-windows"), (0,)),
    "qwen3.5": (lambda: random_target("qwen3.5"), (0,)),
    "deepseek-v3": (lambda: random_target("deepseek-v3"), (0,)),
    # Its embedding is scaled, and the drafter's is not.
    "gemma3": (gemma3, (0,)),
    # Its stream stands for a part of what it is.
    "granite": (lambda: hybrid("granite"), (0, 2)),
    # The last of its layers keep nothing.
    "nemotron": (lambda: hybrid("nemotron"), (4, 0)),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_targets_of_other_kinds(tmp_path: Path, kind: str) -> None:
    """What their streams leave, in prefill and in decode, and after drafts were refused."""
    make, layers = TARGETS[kind]
    target, path = make(), tmp_path / "target"
    target.save_pretrained(path)
    shape = BlockShape(layers=layers, windows=(0,), dspark=True, rank=8)
    pair = pair_of(tmp_path / "block", target, path, shape)
    with open_speculating(pair.mode(), pair.path, **IN_STEP) as engine:
        requests = [engine.submit(prompt, greedy(9, **ENDLESS)) for prompt in prompts_of(21, 2)]
        follow(pair, engine, requests)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("name", AGREEING)
def test_on_a_gpu_graphs_hold_kernels_alone(pairs: dict[str, Pair], name: str, pdl: bool) -> None:
    check_graphs(pairs[f"{name}-agrees"], random_jobs(VOCAB - 1), pdl=pdl)
