"""EAGLE3: every draft is that of a plain forward of the same head, for every kind of target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.eagle3_heads import (
    PREFIX,
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
from engines.plain_trees import Root, drafted_tree, plain_tree
from engines.small_engine import assert_idle, greedy, sampled
from engines.speculation import (
    BEST,
    ENDLESS,
    TREE,
    Job,
    open_plain,
    open_speculating,
    outcomes,
    random_jobs,
)
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
    prompts_of,
)
from graphengine import Engine, PromptParts, Request
from graphengine.drafters import FieldSizes
from graphengine.drafters.modules import chain as eagle
from graphengine.kernels.attention import reference
from graphengine.options.drafts.draft_trees import Tree
from graphengine.speculative import Eagle3, describe
from launches.compilation import graph_kernels

K = 3


class Pair(NamedTuple):
    """A target with a head beside it, and the paths of both."""

    target: Any
    path: Path
    shape: Shape
    tensors: Tensors
    drafter_path: Path

    def head(self) -> Head:
        model = self.target
        embedding = model.get_input_embeddings().weight.detach()
        return Head(self.shape, self.tensors, embedding, model.lm_head.weight.detach())

    def mode(self, **options: Any) -> Eagle3:
        layers = None if min(self.shape.layers) else self.shape.layers
        return Eagle3(self.drafter_path, K, layers=layers, **options)

    def follower(self, engine: Engine, request: Request) -> Follower:
        return Follower(self, engine, request)


def pair_of(
    folder: Path, target: Any, shape: Shape, *, speculators: bool = False, evenly: bool = False
) -> Pair:
    """evenly: the head attends to all tokens alike."""
    target.save_pretrained(folder / "target")
    embedding = target.get_input_embeddings().weight.detach()
    tensors = head_tensors(shape, embedding, target.lm_head.weight.detach())
    if evenly:
        tensors[f"{PREFIX}self_attn.q_proj.weight"].zero_()
    config, stored = head_config(shape, embedding), tensors
    if speculators:
        config, stored = as_speculators(config, tensors)
    path = write_head(folder / "head", config, stored)
    return Pair(target, folder / "target", shape, tensors, path)


SHAPES: dict[str, tuple[Shape, bool]] = {
    "published": (Shape(), False),
    "speculators": (
        Shape(
            layers=(1, 6, 4), narrower=50, bias=True, normed_stream=True, norms=("input_norm",),
        ), True,
    ),
    # EAGLE 3.1 norms each stream, and its output.
    "whole vocabulary": (
        Shape(
            layers=(3, 7), drafted=0, normed_output=True, norms=("fc_norm.0", "fc_norm.1"),
        ), False,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder, target = tmp_path_factory.mktemp("eagle3"), llama()
    found = {
        name: pair_of(folder / name, target, shape, speculators=speculators)
        for name, (shape, speculators) in SHAPES.items()
    }
    return found | {"even": pair_of(folder / "even", target, Shape(), evenly=True)}


# The drafts.


class Follower:
    """A plain head that goes along with a request of an engine."""

    def __init__(self, pair: Pair, engine: Engine, request: Request) -> None:
        self.pair, self.engine, self.request = pair, engine, request
        self.head, self.committed = pair.head(), 0
        self.counts: set[int] = set()

    def take_in(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What was emitted: what lm_head reads after it, and what the next run is fed."""
        request, pair, head = self.request, self.pair, self.head
        sequence = [*request.prompt_token_ids, *request.token_ids]
        end = len(sequence) - 1
        streams = streams_of(pair.target, sequence[:-1], pair.shape.layers)
        for position in range(self.committed, end):
            token, g = sequence[position + 1], head.fuse(streams[position])
            output, recycled = head.run(token, g, position)
        self.committed = end
        return output, recycled

    @torch.no_grad()
    def check_tree(self, tree: Tree) -> None:
        """The nodes after a step."""
        output, recycled = self.take_in()

        def run(token: int, g: Any, position: int) -> tuple[torch.Tensor, Any]:
            after, g = self.head.run(token, g, position)
            return self.head.logits(after), g

        root = Root(run, self.head.logits(output), recycled, self.committed)
        expected = plain_tree(tree, root, self.request.params)
        assert drafted_tree(self.engine, self.request) == expected

    @torch.no_grad()
    def check(self, count: int, *, drafted: bool = True) -> None:
        """The drafts, where there are some, and the cache after a step of this many tokens."""
        (output, recycled), request, head = self.take_in(), self.request, self.head
        end = self.committed
        if not drafted:
            self.check_cache(end)
            return
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


@pytest.mark.parametrize("name", SHAPES)
def test_drafts_are_those_of_a_plain_forward(pairs: dict[str, Pair], name: str) -> None:
    """After every step, whatever was accepted, beside a row that goes its own way; after prompts of
    one token, of one chunk and of several.
    """
    pair = pairs[name]
    with open_speculating(pair.mode(), pair.path, **IN_STEP) as engine:
        params = greedy(26, **ENDLESS)
        requests = [engine.submit(prompt, params) for prompt in prompts_of(21, 1, 6)]
        followers = follow(pair, engine, requests)
        counts = set().union(*(follower.counts for follower in followers))
        assert 1 in counts and max(counts) >= K, f"steps that accept none, and many: {counts}"
        assert_idle(engine)


def test_embeddings_of_a_prompt_are_read_as_tokens(pairs: dict[str, Pair]) -> None:
    """Drafts after rows of the table are those after the tokens of the rows, chunk by chunk."""
    pair, options = pairs["published"], SMALL | {"prompt_embeds": True, "device": "cpu"}
    table = pair.target.get_input_embeddings().weight.detach()
    (ids,) = prompts_of(21)
    with open_speculating(pair.mode(), pair.path, **options) as engine:
        expected = engine.generate(ids, greedy(26, **ENDLESS))
        assert expected.acceptance.accepted > 0
        for first, stop in ((0, 21), (3, 9), (15, 17)):
            prompt = PromptParts(ids[:first], table[ids[first:stop]], ids[stop:])
            result = engine.generate(prompt, greedy(26, **ENDLESS))
            assert result.token_ids == expected.token_ids
            assert result.acceptance == expected.acceptance
    pair = pairs["speculators"]
    message = "prompt_embeds=True, but the embeddings of .* have 50 values, and those of a prompt"
    with pytest.raises(ValueError, match=message):
        open_speculating(pair.mode(), pair.path, **options)


def test_after_pauses(pairs: dict[str, Pair]) -> None:
    check_pauses(pairs["published"], prompts_of(21, 9, 6), tokens=40, blocks=15)


def test_a_gate_leaves_the_head_warm(pairs: dict[str, Pair]) -> None:
    check_gate(pairs["published"], prompts_of(21, 6), tokens=40, enough=3.0)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_turns_rewinds_and_snapshots(pairs: dict[str, Pair], tmp_path: Path, kv_dtype: str) -> None:
    check_turns(
        pairs["speculators"],
        pairs["published"],
        prompts_of(19, 5, 7),
        tmp_path,
        kv_dtype=kv_dtype,
        tokens=16,
        cached=40,
    )


@pytest.mark.parametrize("writer", ["advance_module_draft", "commit_draft"])
def test_a_later_draft_that_is_garbage_is_no_plain_forward_s(
    monkeypatch: pytest.MonkeyPatch, pairs: dict[str, Pair], writer: str
) -> None:
    write = getattr(eagle, writer)

    def spoiled(*operands: Any, index: int, **options: Any) -> Any:
        written = write(*operands, index=index, **options)
        rows, tokens = operands[1], operands[-1]
        if index:
            tokens[rows.slot[rows.slot >= 0].long(), index] = 7
        return written

    monkeypatch.setattr(eagle, writer, spoiled)
    with pytest.raises(AssertionError, match=r"draft [12] of \["):
        test_drafts_are_those_of_a_plain_forward(pairs, "published")


@pytest.mark.parametrize("layers", [(1, 4, 3), (1, 3, 5)])
def test_another_layer_or_another_order_is_no_plain_forward_s(
    pairs: dict[str, Pair], layers: tuple[int, ...]
) -> None:
    pair = pairs["published"]
    mode = Eagle3(pair.drafter_path, K, layers=layers)
    with open_speculating(mode, pair.path, **IN_STEP) as engine:
        request = engine.submit(prompts_of(21)[0], greedy(26, **ENDLESS))
        with pytest.raises(AssertionError, match=r"draft \d of \[|error="):
            follow(pair, engine, [request])


TREES: dict[str, Any] = {"static": TREE, "dynamic": BEST}


@pytest.mark.parametrize(
    ("name", "tree"),
    [("published", "static"), ("published", "dynamic"), ("speculators", "dynamic"),
     ("even", "dynamic"),
     ("whole vocabulary", "static")],
)  # fmt: skip
def test_trees_are_those_of_a_plain_head(pairs: dict[str, Pair], name: str, tree: str) -> None:
    """Node for node, after every step, of a greedy request and of one with noise."""
    pair, mode = pairs[name], Eagle3(pairs[name].drafter_path, tree=TREES[tree])
    mode = replace(mode, layers=pair.mode().layers)
    shape = mode.shape
    assert shape is not None and mode.k == shape.nodes == 9
    with open_speculating(mode, pair.path, **IN_STEP) as engine:
        params = [greedy(15, **ENDLESS), sampled(15, seed=8)]
        requests = [
            engine.submit(prompt, each)
            for prompt, each in zip(prompts_of(21, 6), params, strict=True)
        ]
        followers = [Follower(pair, engine, request) for request in requests]
        done, counts = [0, 0], set()
        while engine.busy:
            engine.step()
            for index, request in enumerate(requests):
                count = len(request.token_ids) - done[index]
                done[index] += count
                if count and not request.finished:
                    counts.add(count)
                    followers[index].check_tree(shape)
        assert len(counts) > 1, f"steps that accept few, and many: {counts}"


def test_a_sibling_that_the_head_sees_is_found(
    monkeypatch: pytest.MonkeyPatch, pairs: dict[str, Pair]
) -> None:
    entries = reference._path_entries

    def with_sibling(tree: Any, lane: int, position: int) -> list[int]:
        """In a path of the head's run, which has no root, the last ancestor is another node."""
        path = entries(tree, lane, position)
        if bool((tree.node > 0).all()) and len(path) > 2:
            path[-2] -= 1
        return path

    monkeypatch.setattr(reference, "_path_entries", with_sibling)
    with pytest.raises(AssertionError, match=r"Node\("):
        test_trees_are_those_of_a_plain_head(pairs, "even", "dynamic")


# Tokens.


@pytest.mark.parametrize("tree", TREES)
def test_tokens_with_trees_are_those_without(
    device: str, pairs: dict[str, Pair], tree: str
) -> None:
    """And with pauses; the order of its lm_head's rows is not that of the tokens."""
    pair = pairs["speculators"]
    jobs = [Job(tuple(range(first, first + 29)), greedy(40, **ENDLESS)) for first in (1, 9)]
    jobs += random_jobs(VOCAB, count=3)
    with open_plain(pair.path, **SMALL, device=device) as engine:
        expected = outcomes(engine, jobs)
    options = SMALL | {"kv_blocks": 14, "swap_blocks": 40, "device": device}
    mode = Eagle3(pair.drafter_path, tree=TREES[tree])
    with open_speculating(mode, pair.path, **options) as engine:
        assert outcomes(engine, jobs) == expected
        assert 0 < engine.acceptance.accepted < engine.acceptance.proposed
        assert engine.counters["pauses"] > 0
        assert_idle(engine)


def test_a_tree_says_what_it_is() -> None:
    mode = Eagle3("somewhere", tree=BEST)
    assert describe(mode) == (
        "eagle3 somewhere, tree of the best 9 nodes, up to 4 deep, 3 after a node"
    )
    with pytest.raises(ValueError, match="k=5 drafts a step, and the tree has 9 nodes"):
        Eagle3("somewhere", 5, tree=TREE)


def test_tokens_are_those_without(device: str, pairs: dict[str, Pair]) -> None:
    check_tokens(pairs["speculators"], random_jobs(VOCAB), device, least=0.0)


def test_one_row_of_few_lanes(pairs: dict[str, Pair]) -> None:
    pair = pairs["published"]
    check_one_row(pair, Eagle3(pair.drafter_path, 1), prompts_of(21, 4))


# What it holds and launches.


def test_what_it_holds_is_in_the_budget(pairs: dict[str, Pair]) -> None:
    for name, pair in pairs.items():
        mode = pair.mode()
        with open_speculating(mode, pair.path, **SMALL, device="cpu") as engine:
            lines = {line.name: line.bytes for line in engine.memory.budget.lines}
            drafter, stored = (
                engine.core.drafter,
                load_file(pair.drafter_path / "model.safetensors"),
            )
            floats = [tensor for tensor in stored.values() if tensor.is_floating_point()]
            ids = 4 * pair.shape.drafted
            assert lines["drafter's weights"] == sum(tensor.nbytes for tensor in floats) + ids
            fields = drafter.fields(FieldSizes(3, 96, 16, torch.float32))
            (streams,) = fields
            assert streams.shape == (16, len(pair.shape.layers) * SIZES["hidden_size"])
            assert lines["drafter's state"] == sum(field.nbytes for field in fields)
            assert engine.core.description["speculative"] == describe(mode), name
            assert engine.runtime.caches[1][0].shape[0] == 1
        # A step's lanes may be more than a chunk's.
        wide = drafter.fields(FieldSizes(9, 96, 16, torch.float32))[0]
        assert wide.shape[0] == 36


def test_a_step_launches_no_kernel_that_copies(pairs: dict[str, Pair]) -> None:
    """The target's five kernels a layer, and the head's; a chunk has a product more than MTP's."""
    pair, options = pairs["published"], SMALL | {"dtype": "bfloat16", "device": "cpu"}
    with open_speculating(pair.mode(), pair.path, **options) as engine:
        graphs = graph_kernels(engine)
    names = [kernel.name for kernel in graphs["decode/3/k3/fast"]]
    target, finish = 1 + 5 * LAYERS, 2
    assert len(names) == target + finish + 2 + 3 * (5 + 1 + 1)
    head = names[target + finish :]
    layer = ["dot_kernel", "decode_attention_kernel", *["dot_kernel"] * 3, "dot_kernel"]
    expected = ["dot_kernel", "begin_kernel", *layer]
    expected += ["advance_kernel", *layer, "advance_kernel", *layer, "commit_kernel"]
    assert [name.lstrip("_") for name in head] == expected, f"{head}"


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_on_a_gpu_graphs_hold_kernels_alone(pairs: dict[str, Pair], pdl: bool) -> None:
    check_graphs(pairs["published"], random_jobs(VOCAB), pdl=pdl)


# Targets of every kind.


def gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = SIZES | {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 5}
    config = GptOssConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    torch.manual_seed(2)
    return GptOssForCausalLM._from_config(config, experts_implementation="eager").eval()


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
    with open_speculating(pair.mode(), pair.path, **IN_STEP) as engine:
        requests = [engine.submit(prompt, greedy(11, **ENDLESS)) for prompt in prompts_of(21, 2)]
        follow(pair, engine, requests)
