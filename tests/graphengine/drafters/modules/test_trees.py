"""Trees of drafts: their nodes are a plain forward's, and no token changes with them.

The tests of speculation and its churn have a tree among their drafters. Here is what only trees do:
their drafts, the move of KV, what is refused, and how they meet every way to end a request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from checkpoints.few_layers import few_layers
from checkpoints.mtp_modules import SIZES, Module
from checkpoints.successors import TOKENS, continuation, write_successors
from checkpoints.vanilla_modules import (
    MODULES,
    agreeing_tensors,
    layout,
    target_model,
    write_agreeing,
)
from engines import speculation
from engines.small_engine import OTHER, PROMPT, greedy, sampled
from engines.speculation import (
    ENDLESS,
    TREE,
    Job,
    outcomes,
    run_with,
    serve,
)
from extent import extent
from graphengine import Engine, EngineConfig, Request, SamplingParams, StructuredOutputsParams
from graphengine.drafters.modules import tree_growth
from graphengine.drafters.modules.making import _check_trees
from graphengine.drafters.modules.tree_growth import StaticGrowth
from graphengine.models.states import Paged, Recurrent
from graphengine.options.drafts.draft_trees import DynamicTree, StaticTree
from graphengine.options.drafts.draft_vocabulary import DraftVocabulary
from graphengine.speculative import FORCE_ACCEPTED, MTP, GateOptions, RelaxedAcceptance

SMALL: dict[str, Any] = {
    "max_batch": 3, "max_seq_len": 96, "block_size": 8, "prefill_buckets": (4, 16),
    "dtype": "float32",
}  # fmt: skip
SHAPE = StaticTree.of(TREE)
# In half precision a GPU attends in shorter splits where there are trees, and bits differ.
open_plain = partial(speculation.open_plain, dtype="float32")
open_speculating = partial(speculation.open_speculating, dtype="float32")


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORCE_ACCEPTED, raising=False)


# Shapes.


def test_a_shape_is_by_depth_and_rank() -> None:
    tree = StaticTree.of([[1], [0, 2], [0], [0, 0], (1, 0), [0, 0, 1]])
    assert tree.paths == ((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 1))
    assert (tree.nodes, tree.depth, tree.parents) == (6, 3, (0, 0, 1, 1, 2, 3))
    assert [tree.ancestors(node) for node in range(7)] == [
        [], [0], [0], [0, 1], [0, 1], [0, 2], [0, 1, 3],
    ]  # fmt: skip
    first, second, third = tree.generations
    assert first == ((0, 0), (0, 1), (1, 2), (0, 1)) and first.drawn == 2
    assert second == ((0, 0, 1), (0, 2, 0), (3, 4, 5), (0,)) and second.drawn == 3
    assert third == ((0,), (1,), (6,), ())
    assert tree.describe() == "tree of 6 nodes, 3 deep"


WRONG_SHAPES: list[tuple[Any, str]] = [
    ([], r"tree=\[\] must be a list of paths"),
    ("0", "tree='0' must be a list of paths"),
    (7, "tree=7 must be a list of paths"),
    ([0, 1], r"path 0 must be a list of ranks, such as \[0, 1\]"),
    ([[0], []], r"path \[\] must be a list of ranks"),
    ([[0], ["a"]], r"path \['a'\] has the rank 'a': ranks are integers in \[0, 15\]"),
    ([[0], [True]], r"the rank True: ranks are integers"),
    ([[0], [-1]], r"path \[-1\] has the rank -1: ranks are integers in \[0, 15\]"),
    ([[0], [0, 16]], r"path \[0, 16\] has the rank 16: ranks are integers in \[0, 15\]"),
    ([[0], [1], [0], [0]], r"has the path \[0\] 3 times"),
    ([[0], [1, 0]], r"has the path \[1, 0\], and not its parent \[1\]"),
    ([[0], [0, 1, 0]], r"has the path \[0, 1, 0\], and not its parent \[0, 1\]"),
    ([[0], [0] * 32], r"has 32 tokens, at most 31 are verified"),
    ([[rank] for rank in range(16)] * 2, "the tree has 32 nodes, at most 31 are verified"),
    ([[0], [0, 0], [0, 0, 0]], "is a chain of 3 drafts: k=3 is the same without a tree"),
]


@pytest.mark.parametrize(("paths", "message"), WRONG_SHAPES)
def test_what_is_no_tree_is_refused(paths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MTP(tree=paths)


def test_options() -> None:
    mode = MTP(tree=TREE)
    assert (mode.k, mode.shape) == (9, SHAPE)
    assert mode == MTP(9, tree=TREE[::-1]) and hash(mode) == hash(MTP(tree=TREE))
    assert mode.describe() == "mtp eagle, tree of 9 nodes, 4 deep"
    with pytest.raises(ValueError, match="k=4 drafts a step, and the tree has 9 nodes"):
        MTP(4, tree=TREE)
    with pytest.raises(ValueError, match="a tree goes with style='eagle', not with style='vani"):
        MTP(tree=TREE, style="vanilla")


# Drafts.


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_agreeing(tmp_path_factory.mktemp("agreeing"))


def check_node(logits: torch.Tensor, ranks: list[int], drafts: list[int]) -> None:
    """Each draft is the token of its rank, or as good as that; no two are the same."""
    near = 1e-4 * float(logits.abs().max())
    ordered = logits.sort(descending=True).values
    for rank, draft in zip(ranks, drafts, strict=True):
        assert abs(float(logits[draft] - ordered[rank])) <= near, f"rank {rank} is {draft}"
    assert len({*drafts}) == len(drafts)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 21])
def test_drafts_are_those_of_a_plain_forward(agreeing: Path, length: int) -> None:
    """Every node, after every step, whatever was accepted, beside a row that goes its own way."""
    target, tensors = target_model(), agreeing_tensors(MODULES)
    module = Module(layout(MODULES), tensors, layout(MODULES).prefixes[0])
    generator = torch.Generator().manual_seed(length)
    prompt, other = torch.randint(SIZES["vocab_size"], (2, length), generator=generator).tolist()
    counts = set()
    with open_speculating(MTP(tree=TREE), agreeing, **SMALL, device="cpu", lookahead=0) as engine:
        request = engine.submit(prompt, greedy(18, **ENDLESS))
        engine.submit(other, greedy(18, **ENDLESS))
        committed = 0
        while not request.finished:
            before = len(request.token_ids)
            engine.step()
            count = len(request.token_ids) - before
            if request.finished or not count:
                continue
            counts.add(count)
            sequence = [*prompt, *request.token_ids]
            end = len(sequence) - 1
            hidden = target.model(torch.tensor([sequence[:-1]])).last_hidden_state[0]
            for position in range(committed, end):
                u = module.run(sequence[position + 1], hidden[position], position)
            committed = end
            drafts = engine.runtime.buffers["draft_tokens"][request.job.placed.slot].tolist()
            for node in range(1 + SHAPE.nodes):
                path = [*SHAPE.ancestors(node), node][1:]
                children = [
                    child for child in range(1, 1 + SHAPE.nodes) if SHAPE.parents[child - 1] == node
                ]
                after = u
                for index, each in enumerate(path):
                    after = module.run(drafts[each - 1], after, end + index)
                ranks = [SHAPE.paths[child - 1][-1] for child in children]
                check_node(module.logits(after), ranks, [drafts[child - 1] for child in children])
    assert 1 in counts and max(counts) >= 3, f"steps that accept none, and many: {counts}"


@pytest.mark.parametrize("params", [greedy(12, **ENDLESS), sampled(12, seed=4)], ids=str)
def test_the_first_path_is_a_chain(device: str, params: SamplingParams) -> None:
    """Greedily and sampled, bit for bit: the module's run over a level has a chain's bits."""
    found = []
    for mode in (MTP(4), MTP(tree=TREE)):
        # Nothing is accepted, so that both go on from the same tokens.
        options: dict[str, Any] = {"device": device, "lookahead": 0, "forced_acceptance": 0}
        with open_speculating(mode, **options) as engine:
            requests = [engine.submit(text, params) for text in (PROMPT, OTHER)]
            drafts = []
            while engine.busy:
                engine.step()
                # The tokens of a step are there before its drafts.
                engine.runtime.synchronize()
                table = engine.runtime.buffers["draft_tokens"]
                drafts += [table[r.job.placed.slot].tolist() for r in requests if r.job.placement]
        first = [node - 1 for node in (1, 4, 7, 9)]
        found.append([row if mode.tree is None else [row[i] for i in first] for row in drafts])
    assert found[0] == found[1] and len(found[0]) > 15


@pytest.mark.parametrize("half", ["hidden", "token"])
def test_every_depth_of_who_cannot_be_wrong_is_accepted(
    device: str, successors: dict[str, Path], half: str
) -> None:
    params = SamplingParams(
        temperature=1.0 if half == "token" else 0.0, seed=11, max_tokens=21, **ENDLESS
    )
    prompts = [[first, *continuation(first, 9)] for first in (3, 21, 40, 63)]
    with open_speculating(
        MTP(tree=TREE), successors[half], **SMALL, device=device, lookahead=1
    ) as engine:
        for prompt in prompts:
            engine.submit(prompt, params)
        run_with(engine)
        assert engine.acceptance.rates == [1.0] * SHAPE.depth, f"{engine.acceptance}"
        assert engine.acceptance.mean_length == 1 + SHAPE.depth


def test_second_best_tokens_are_accepted(device: str, agreeing: Path) -> None:
    """Modules are not always right: a wider tree of the same depth gets further."""
    lengths = []
    for paths in ([[0], [0, 0], [1]], [[0], [1], [2], [3], [0, 0], [1, 0], [2, 0], [0, 1]]):
        with open_speculating(MTP(tree=paths), agreeing, **SMALL, device=device) as engine:
            for seed in range(3):
                engine.submit([1, 2, 3], sampled(30, seed=seed))
            run_with(engine)
            lengths.append(engine.acceptance.mean_length)
    assert lengths[1] > lengths[0] + 0.1, lengths


@pytest.mark.parametrize("spoiled", [1, 3])
def test_a_wrong_node_is_found(
    monkeypatch: pytest.MonkeyPatch, successors: dict[str, Path], spoiled: int
) -> None:
    """Which no engine's tokens show."""
    grow = tree_growth.grow_tree

    def spoil(*operands: Any, **options: Any) -> Any:
        _, _, rows, level, tokens, _ = operands
        following = grow(*operands, **options)
        if int(level.node[0]) >= (1, 4, 7, 9)[spoiled]:
            tokens[rows.slot[rows.slot >= 0].long()[:, None], level.node.long() - 1] = 7
        return following

    monkeypatch.setattr(tree_growth, "grow_tree", spoil)
    with pytest.raises(AssertionError, match=r"assert \[1\.0, .*\] == \[1\.0, 1\.0, 1\.0, 1\.0\]"):
        test_every_depth_of_who_cannot_be_wrong_is_accepted("cpu", successors, "hidden")


# The target's keys and values.


def kv_of(engine: Engine, request: Request, length: int) -> torch.Tensor:
    """[layers, positions, 2, G, D] of the target's first positions."""
    cache, table = engine.runtime.caches[0][0], engine.runtime.buffers["block_table"]
    position = torch.arange(length, device=table.device)
    blocks = table[request.job.placed.slot].long()[position // engine.memory.block_size]
    return cache[:, blocks, :, position % engine.memory.block_size]


@pytest.mark.parametrize("length", [3, 8, 21])
def test_the_cache_holds_what_plain_decoding_writes(device: str, length: int) -> None:
    """Bit for bit, over several steps whose paths have siblings between their nodes."""
    prompt = list(range(100, 100 + length))
    params = [greedy(60, **ENDLESS), sampled(60, seed=2)]
    found = []
    for mode in (None, MTP(tree=TREE)):
        opened = open_plain(device=device, lookahead=0) if mode is None else open_speculating(
            mode, device=device, lookahead=0
        )  # fmt: skip
        with opened as engine:
            requests = [engine.submit(prompt, each) for each in params]
            while min(len(request.token_ids) for request in requests) < 30:
                engine.step()
            found.append(
                [
                    (request.token_ids[:30], kv_of(engine, request, length + 29))
                    for request in requests
                ]
            )
            if mode is not None:
                assert engine.acceptance.accepted > 5
    for plain, tree in zip(*found, strict=True):
        assert tree[0] == plain[0]
        assert torch.equal(tree[1], plain[1])


# Ends and options.


@pytest.fixture(scope="module")
def successors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("successors")
    return {half: write_successors(folder / half, half) for half in ("hidden", "token")}  # type: ignore[arg-type]


Pair = Callable[..., tuple[list[Any], list[Any]]]


@pytest.fixture
def both(successors: dict[str, Path], device: str) -> Iterator[Pair]:
    """Outcomes of jobs without drafts, and with trees whose first path is right."""
    path = successors["hidden"]
    plain = open_plain(path, **SMALL, device=device)
    trees = open_speculating(MTP(tree=TREE), path, **SMALL, device=device)

    def serve_both(jobs: list[Job]) -> tuple[list[Any], list[Any]]:
        return outcomes(plain, jobs), outcomes(trees, jobs)

    with plain, trees:
        yield serve_both


def test_a_request_may_end_at_every_offset_of_a_path(both: Pair) -> None:
    prompt = (3, *continuation(3, 5))
    known = continuation(prompt[-1], 30)
    # Every 8 tokens the same come again, so a stop must wait for its turn.
    ends: list[dict[str, Any]] = [{"max_tokens": count} for count in range(1, 12)]
    ends += [
        {"max_tokens": 30, "stop_token_ids": [token], "min_tokens": wait}
        for token in known[:5]
        for wait in (0, 6)
    ]
    ends += [
        {"max_tokens": 30, "stop_token_sequences": [known[at : at + size]], "min_tokens": 4}
        for at in range(4)
        for size in (2, 3, 6)
    ]
    ends += [{"max_tokens": None}]
    jobs = [Job(prompt, SamplingParams(temperature=0.0, **ENDLESS, **end)) for end in ends]
    plain, trees = both(jobs)
    assert trees == plain
    assert {len(tokens) for tokens, *_ in trees} >= {*range(1, 12)}


def test_lengths_at_the_end_of_the_table(both: Pair) -> None:
    """Nodes whose entries would be past it have no lanes; neighbours go on as before."""
    prompts = [tuple(i % TOKENS for i in range(96 - room)) for room in (*range(1, 12), 30)]
    jobs = [Job(prompt, greedy(None, **ENDLESS)) for prompt in prompts]
    plain, trees = both(jobs)
    assert trees == plain
    assert [len(tokens) for tokens, *_ in trees] == [*range(1, 12), 30]


OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3, "temperature": 0.0},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7, "seed": 3},
    {"bad_words": ["self", "):", " return"], "temperature": 0.0},
    {"logit_bias": {13: -3.0, 40: 2.0}, "top_k": 30, "seed": 5},
    {"logprobs": 3, "temperature": 0.0, "stop": ["return"]},
    {"logprobs": 2, "top_p": 0.9, "seed": 8, "min_tokens": 20},
]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_options_on_logits(device: str, mode: Any) -> None:
    """Tokens, texts and log-probabilities, to the bit."""
    jobs = [
        Job(text, SamplingParams(max_tokens=22, ignore_eos=True, **options))
        for options in OPTIONS
        for text in extent((PROMPT,), (PROMPT, OTHER))
    ]
    options: dict[str, Any] = {"device": device, "logprobs_mode": mode}
    with open_plain(**options) as engine:
        plain = serve(engine, jobs)
    with open_speculating(MTP(tree=TREE), **options) as engine:
        trees = serve(engine, jobs)
        assert engine.acceptance.accepted > extent(10, 20)
    for ours, theirs in zip(trees, plain, strict=True):
        assert ours.token_ids == theirs.token_ids and ours.text == theirs.text
        assert ours.logprobs == theirs.logprobs


@pytest.mark.parametrize("tree", [TREE, DynamicTree(nodes=9, top_k=3, depth=4)])
def test_a_nodes_best_child_is_drawn_through_filters(device: str, tree: Any) -> None:
    """Where they leave one token, it is that of greedy decoding, whatever the temperature."""
    tokens, steps = [], []
    with open_speculating(MTP(tree=tree), device=device, dtype="float32") as engine:
        for filters in ({"temperature": 0.0}, {"temperature": 3.0, "top_k": 1, "seed": 3}):
            before = engine.acceptance.steps
            params = SamplingParams(**filters, **ENDLESS, max_tokens=24)
            tokens.append([each.token_ids for each in engine.generate([PROMPT, OTHER], params)])
            steps.append(engine.acceptance.steps - before)
    assert tokens[0] == tokens[1]
    assert steps[1] <= 1.2 * steps[0], f"{steps=}"


def test_grammars_follow_every_path(device: str) -> None:
    pytest.importorskip("llguidance")
    asked = StructuredOutputsParams(regex=r"(True|False|None)(, (True|False|None)){5}")
    params = [
        SamplingParams(max_tokens=40, structured_outputs=asked, **options)
        for options in ({"temperature": 0.0}, {"seed": 1})
    ]
    jobs = [Job(text, each) for each in params for text in (PROMPT, "x = [")]
    with open_plain(device=device) as engine:
        expected = outcomes(engine, jobs)
    with open_speculating(MTP(tree=TREE), device=device) as engine:
        assert outcomes(engine, jobs) == expected
        # The draft module knows no grammar, but some tokens follow by themselves.
        assert engine.acceptance.accepted > 10, f"{engine.acceptance}"


def test_a_gate_changes_no_token(device: str) -> None:
    gate = GateOptions(window=3, off_below=0.6, on_above=0.6, probe_every=3)
    jobs = [Job(text, greedy(40, **ENDLESS)) for text in (PROMPT, OTHER, "x")]
    with open_plain(device=device) as engine:
        expected = outcomes(engine, jobs)
    with open_speculating(MTP(tree=TREE), device=device, gate=gate) as engine:
        assert outcomes(engine, jobs) == expected
        assert engine.counters["gate/off"] and engine.counters["gate/on"]


@pytest.mark.parametrize("forced", [0, 2, 9])
def test_forced_acceptance_takes_the_first_path(device: str, forced: int) -> None:
    with open_speculating(MTP(tree=TREE), device=device, forced_acceptance=forced) as engine:
        request = engine.submit(PROMPT, greedy(31, **ENDLESS))
        run_with(engine)
        assert len(request.token_ids) == 31
        assert request.acceptance.mean_length == 1 + min(forced, SHAPE.depth)


# Room.


def test_nodes_decide_what_is_reserved(device: str) -> None:
    """Entries past the request's end are part of its need; less than that is refused."""
    prompt, params = [1, 2, 3, 4, 5], greedy(20, **ENDLESS)
    with open_plain(device=device) as engine:
        expected = engine.generate(prompt, params).token_ids
    options: dict[str, Any] = {"device": device, "swap_blocks": 16}
    # 24 of 25 tokens have entries, and 8 nodes more may.
    with (
        open_speculating(MTP(tree=TREE), **options, kv_blocks=3) as engine,
        pytest.raises(ValueError, match=r"25 tokens .*and 8 more of its drafter needs 4 KV blocks"),
    ):
        engine.submit(prompt, params)
    with open_speculating(MTP(tree=TREE), **options, kv_blocks=4) as engine:
        for result in engine.generate([prompt] * 4, params):
            assert result.token_ids == expected
        assert engine.core.needs.reserve == SHAPE.nodes - 1


def test_its_tables_are_in_the_budget() -> None:
    growth = StaticGrowth(SHAPE, rows=3)
    growth.open({"draft_tokens": torch.zeros(5, SHAPE.nodes, dtype=torch.int32)})
    tables = growth.trees
    held = [tables.depth[0], tables.ancestor[0]]
    for generation in growth._generations:
        held += [*generation.level, *generation.lanes]
    held.append(growth._lanes([*range(1 + SHAPE.nodes)], 1, torch.device("cpu")).node)
    assert sum(tensor.nbytes for tensor in held) == growth.table_bytes + held[-1].nbytes


def test_too_many_lanes_are_refused() -> None:
    with pytest.raises(ValueError, match="7 rows with k=9 drafts feed 70 tokens a step"):
        open_speculating(MTP(tree=TREE), max_batch=7)


# What has no trees.


KV = Paged(2, (2, 64))


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        ([(KV,), (Recurrent("conv", (3,)), Recurrent("state", (4,)))], "2 recurrent states, which"),
        ([(KV, KV._replace(window=7)), (KV._replace(window=9),)], "windows of 9 tokens"),
        ([(Paged(1, (96,)),), (Paged(1, (96,)),)], "latent attention in 2 layers"),
    ],
)
def test_layers_without_trees(states: list[Any], reason: str) -> None:
    config = EngineConfig(speculative=MTP(tree=TREE), max_batch=4)
    model = cast(Any, SimpleNamespace(architecture="Some", states=states))
    with pytest.raises(ValueError, match=f"trees of drafts are for layers .* a Some has {reason}"):
        _check_trees(config, model)


def test_relaxed_acceptance_has_no_trees() -> None:
    marks = RelaxedAcceptance(begin_token_ids=[1], end_token_ids=[2])
    with pytest.raises(ValueError, match="relaxed_acceptance is for chains of drafts, not for tr"):
        open_speculating(MTP(tree=TREE), relaxed_acceptance=marks)


def test_a_rank_that_the_vocabulary_lacks(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def f(): pass", encoding="utf-8")
    mode = MTP(tree=[[0], [9]], draft_vocab=DraftVocabulary(text=text, size=4))
    with pytest.raises(ValueError, match="nodes of rank 9, and the draft vocabulary 4 tokens"):
        open_speculating(mode)


def test_a_trimmed_vocabulary(tmp_path: Path, device: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text(json.dumps([PROMPT, OTHER] * 4), encoding="utf-8")
    jobs = [Job(PROMPT, greedy(20)), Job(OTHER, sampled(20, seed=1))]
    with open_plain(device=device) as engine:
        expected = outcomes(engine, jobs)
    mode = MTP(tree=TREE, draft_vocab=DraftVocabulary(text=text, size=300))
    with open_speculating(mode, few_layers(), device=device) as engine:
        assert outcomes(engine, jobs) == expected
        assert engine.acceptance.proposed > 0
