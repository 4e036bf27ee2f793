"""EAGLE3: every draft is that of a plain forward of the same head, for every kind of target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from checkpoints import hybrids
from checkpoints.eagle3_heads import (
    Head,
    Shape,
    Tensors,
    as_speculators,
    head_config,
    head_tensors,
    streams_of,
    write_head,
)
from checkpoints.mtp_chains import SIZES, VOCAB, random_target
from engines.small_engine import assert_idle, greedy
from engines.speculation import ENDLESS, open_speculating
from graphengine import Engine, Request
from graphengine.speculative import Eagle3

K = 3
SMALL: dict[str, Any] = {
    "max_batch": 3, "max_seq_len": 96, "block_size": 8, "prefill_buckets": (4, 16),
    "dtype": "float32",
}  # fmt: skip


class Pair(NamedTuple):
    """A target with a head beside it, and the paths of both."""

    target: Any
    path: Path
    shape: Shape
    tensors: Tensors
    head_path: Path

    def head(self) -> Head:
        model = self.target
        embedding = model.get_input_embeddings().weight.detach()
        return Head(self.shape, self.tensors, embedding, model.lm_head.weight.detach())

    def mode(self, **options: Any) -> Eagle3:
        layers = None if min(self.shape.layers) else self.shape.layers
        return Eagle3(self.head_path, K, layers=layers, **options)


def pair_of(folder: Path, target: Any, shape: Shape, *, speculators: bool = False) -> Pair:
    target.save_pretrained(folder / "target")
    embedding = target.get_input_embeddings().weight.detach()
    tensors = head_tensors(shape, embedding, target.lm_head.weight.detach())
    config, stored = head_config(shape, embedding), tensors
    if speculators:
        config, stored = as_speculators(config, tensors)
    path = write_head(folder / "head", config, stored)
    return Pair(target, folder / "target", shape, tensors, path)


def llama() -> Any:
    """Its next token follows mostly from the last one."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 8})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.05)
        model.model.embed_tokens.weight.mul_(6)
    return model


SHAPES: dict[str, tuple[Shape, bool]] = {
    "published": (Shape(), False),
    "speculators": (
        Shape(layers=(1, 6, 4), narrower=50, bias=True, normed_stream=True), True,
    ),
    "whole vocabulary": (Shape(layers=(3, 7), drafted=0, normed_output=True), False),
}  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder, target = tmp_path_factory.mktemp("eagle3"), llama()
    return {
        name: pair_of(folder / name, target, shape, speculators=speculators)
        for name, (shape, speculators) in SHAPES.items()
    }


# The drafts.


class Follower:
    """A plain head that goes along with a request of an engine."""

    def __init__(self, pair: Pair, engine: Engine, request: Request) -> None:
        self.pair, self.engine, self.request = pair, engine, request
        self.head, self.committed = pair.head(), 0
        self.counts: set[int] = set()

    @torch.no_grad()
    def check(self, count: int) -> None:
        """The drafts and the cache after a step that brought this many tokens."""
        request, pair, head = self.request, self.pair, self.head
        sequence = [*request.prompt_token_ids, *request.token_ids]
        end = len(sequence) - 1
        streams = streams_of(pair.target, sequence[:-1], pair.shape.layers)
        for position in range(self.committed, end):
            token, g = sequence[position + 1], head.fuse(streams[position])
            output, recycled = head.run(token, g, position)
        self.committed = end
        slot = request.job.placed.slot
        drafts = self.engine.runtime.buffers["draft_tokens"][slot].tolist()
        for index, draft in enumerate(drafts):
            logits = head.logits(output)
            near = 1e-4 * float(logits[logits.isfinite()].abs().max())
            assert float(logits[draft]) >= float(logits.max()) - near, f"draft {index} of {drafts}"
            if index + 1 < len(drafts):
                output, recycled = head.run(draft, recycled, end + index)
        self.check_cache(end + len(drafts) - 1)
        self.counts.add(count)

    def check_cache(self, length: int) -> None:
        engine = self.engine
        table = engine.runtime.buffers["block_table"][self.request.job.placed.slot]
        position = torch.arange(length)
        (kv,) = engine.runtime.caches[1][0]
        entries = kv[table[position // 8].long(), :, position % 8]
        expected = torch.stack([torch.stack(self.head.cache[p]) for p in range(length)])
        error = (entries - expected).abs().amax(dim=(1, 2, 3)) / expected.abs().max()
        assert error.max() <= 1e-4, f"{error=}"


def follow(pair: Pair, engine: Engine, requests: list[Request]) -> list[Follower]:
    """Step the requests to their end, with a check after every step of each."""
    followers = [Follower(pair, engine, request) for request in requests]
    lengths = [0] * len(requests)
    while engine.busy:
        engine.step()
        for index, follower in enumerate(followers):
            request, count = requests[index], len(requests[index].token_ids) - lengths[index]
            lengths[index] += count
            if count and not request.finished and request in engine.scheduler.active:
                follower.check(count)
    return followers


def prompts_of(length: int, *others: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randint(1, VOCAB, (count,), generator=generator).tolist()
        for count in (length, *others)
    ]


@pytest.mark.parametrize("own_graph", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_drafts_are_those_of_a_plain_forward(
    pairs: dict[str, Pair], name: str, own_graph: bool
) -> None:
    """After every step, whatever was accepted, beside a row that goes its own way; after prompts of
    one token, of one chunk and of several.
    """
    pair = pairs[name]
    mode = pair.mode(own_graph=own_graph)
    with open_speculating(mode, pair.path, **SMALL, device="cpu", lookahead=0) as engine:
        params = greedy(26, **ENDLESS)
        requests = [engine.submit(prompt, params) for prompt in prompts_of(21, 1, 6)]
        followers = follow(pair, engine, requests)
        counts = set().union(*(follower.counts for follower in followers))
        assert 1 in counts and max(counts) >= K, f"steps that accept none, and many: {counts}"
        assert_idle(engine)


def test_after_pauses(pairs: dict[str, Pair]) -> None:
    """Rows that gave their blocks away, among them the head's, go on with the drafts they had."""
    pair, options = pairs["published"], SMALL | {"kv_blocks": 15, "swap_blocks": 40}
    with open_speculating(pair.mode(), pair.path, **options, device="cpu", lookahead=0) as engine:
        requests = [engine.submit(prompt, greedy(40, **ENDLESS)) for prompt in prompts_of(21, 9, 6)]
        follow(pair, engine, requests)
        assert engine.counters["pauses"] > 0 and engine.counters["resumes"] > 0


# Targets of every kind.


def gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = SIZES | {"sliding_window": 5, "sliding_window_pattern": 2, "pad_token_id": 0}
    torch.manual_seed(2)
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes)).eval()


def gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = SIZES | {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 5}
    config = GptOssConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    torch.manual_seed(2)
    return GptOssForCausalLM._from_config(config, experts_implementation="eager").eval()


def hybrid(kind: str) -> Any:
    torch.manual_seed(2)
    return hybrids.MODELS[kind]().eval()


TARGETS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "qwen3-windows": (lambda: random_target("qwen3-windows"), (1, 0)),
    "qwen3.5": (lambda: random_target("qwen3.5"), (0, 1)),
    "qwen3-moe": (lambda: random_target("qwen3-moe"), (0, 1)),
    "deepseek-v3": (lambda: random_target("deepseek-v3"), (0, 1)),
    "glm4-moe": (lambda: random_target("glm4-moe"), (1, 0)),
    "gemma3": (gemma3, (0, 1)),
    "gpt-oss": (gpt_oss, (0, 1)),
    # Its stream stands for a part of what it is.
    "granite": (lambda: hybrid("granite"), (0, 2, 3)),
    # Layers of one block each, the last of which keep nothing.
    "nemotron": (lambda: hybrid("nemotron"), (0, 4, 3)),
    "lfm2": (lambda: hybrid("lfm2"), (2, 0)),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_targets_of_every_kind(tmp_path: Path, kind: str) -> None:
    """What their streams leave, in prefill and in decode, and after drafts were refused."""
    make, layers = TARGETS[kind]
    pair = pair_of(tmp_path, make(), Shape(layers=layers, drafted=61))
    with open_speculating(pair.mode(), pair.path, **SMALL, device="cpu", lookahead=0) as engine:
        requests = [engine.submit(prompt, greedy(11, **ENDLESS)) for prompt in prompts_of(21, 2)]
        follow(pair, engine, requests)
