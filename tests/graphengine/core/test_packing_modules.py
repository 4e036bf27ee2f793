"""Prefills that feed several prompts, with drafters that have KV of their own: no bit
depends on which, neither of the KV nor of the first drafts, and the same drafts are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.few_layers import HEAD_LAYERS, block_drafter, eagle3_head, few_layers
from checkpoints.vanilla_modules import write_agreeing
from engines.packed_replies import prompt_of, replies, same
from engines.small_engine import greedy, open_engine
from engines.speculation import BEST, TREE
from extent import some_of
from graphengine import MTP, DFlash, DraftModel, Eagle3, Engine, GateOptions, RelaxedAcceptance
from graphengine.options.drafts.mode import Mode
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.shapes import Subject
from graphengine.speculative import Feed

PACKED: dict[str, Any] = {"device": "cpu", "prompts_per_prefill": 3, "max_batch": 4}
BEGIN, END = 5, 6
LENGTHS = (20, 5, 1, 40, 9, 12)


def prompts_of(vocabulary: int) -> list[list[int]]:
    """Each has another length; the last one begins like the first."""
    found = [(prompt_of(-(-length // 3), vocabulary=vocabulary) * 3)[:length] for length in LENGTHS]
    return [*found, found[0][:16] + found[1]]


def after_prompts(engine: Engine) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Filled as the engine prefills: logits and first drafts after each prompt, by its length."""
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    program, buffers = engine.runtime.program, engine.runtime.buffers
    prefill = program.prefill

    def prefilled(*arguments: Any) -> Any:
        outputs = prefill(*arguments)
        fields = ("prefill_slot", "prefill_start", "prefill_count", "prefill_final")
        chunks = zip(*(buffers[name].tolist() for name in fields), strict=True)
        for place, (slot, start, count, final) in enumerate(chunks):
            if final:
                drafts = buffers["draft_tokens"][slot].clone()
                found[start + count] = outputs.logits[place].clone(), drafts
        return outputs

    program.prefill = prefilled  # type: ignore[method-assign]
    return found


def check_alike(
    opened: Callable[[], Engine],
    *,
    vocabulary: int = 4000,
    pauses: bool = False,
    gated: bool = False,
) -> None:
    """Prompts give the same alone and together, and as many of their drafts are accepted.

    gated  whether rows together have no drafts
    """
    prompts, tokens = prompts_of(vocabulary), {"tokens": 20 if pauses else 6}
    with opened() as engine:
        expected = after_prompts(engine)
        alone = [replies(engine, [prompt], [tokens])[0] for prompt in prompts]
        assert not engine.counters["packed_chunks"]
        acceptance = engine.acceptance
        assert acceptance.accepted > 0
    with opened() as engine:
        found = after_prompts(engine)
        together = replies(engine, prompts, [tokens] * len(prompts))
        assert engine.counters["packed_chunks"] >= 2
        assert engine.counters["pauses"] > 0 or not pauses, engine.counters
        assert gated or engine.acceptance == acceptance
    for prompt, one, other in zip(prompts, alone, together, strict=True):
        assert same(one, other), f"a prompt of {len(prompt)} tokens"
    assert found.keys() == expected.keys() == {len(prompt) for prompt in prompts}
    for length, bits in expected.items():
        assert all(map(torch.equal, bits, found[length])), f"a prompt of {length} tokens"


HEAD = Eagle3(eagle3_head(), k=3, layers=HEAD_LAYERS)
DRAFT_MODEL, BLOCKS = DraftModel(few_layers(), k=3), DFlash(block_drafter(), k=3)
CASES: list[tuple[Mode, Mapping[str, Any]]] = [
    (MTP(k=3), {"prefix_caching": True, "max_seq_len": 64, "kv_blocks": 8}),
    (HEAD, {"lookahead": 0}),
    (BLOCKS, {"lookahead": 2}),
    (DRAFT_MODEL, {"prefix_caching": True}),
    (MTP(tree=TREE), {}),
    (MTP(tree=BEST), {"prefix_caching": True}),
    (MTP(k=3), {"lookahead": 2}),
    (MTP(k=3, min_confidence=0.2), {}),
    (MTP(k=2), {"quantize": "int8"}),
    (HEAD, {"prefix_caching": True}),
    (BLOCKS, {"prefix_caching": True, "max_seq_len": 64, "kv_blocks": 8}),
    (DraftModel(few_layers(), k=3, min_confidence=0.2), {}),
    (Eagle3(eagle3_head(), layers=HEAD_LAYERS, tree=TREE), {}),
]


@pytest.mark.parametrize("mode, options", some_of(CASES, 0, 1, 2, 3, 4, 5), ids=str)
def test_drafts_with_weights(mode: Mode, options: Mapping[str, Any]) -> None:
    pauses = "kv_blocks" in options
    check_alike(lambda: open_engine(**PACKED | {"speculative": mode} | options), pauses=pauses)


@pytest.mark.parametrize("shape", ["tiny-delta", "tiny-moe"])
def test_drafts_beside_recurrent_layers_and_experts(shape: str) -> None:
    """The module of the latter has experts, too."""
    sizes = {"max_seq_len": 128, "block_size": 8, "prefill_buckets": (8, 32), "dtype": "float32"}
    options = PACKED | sizes | {"speculative": MTP(k=2), "prefix_caching": True, "lookahead": 0}
    check_alike(lambda: build_engine(Subject.of_shape(shape), options)[0], vocabulary=250)


def test_relaxed_acceptance_begins_and_ends_in_each_prompt() -> None:
    """Prompts that begin to think accept other drafts than those that do not, alone as together."""
    prompts = [[*prompt, BEGIN] for prompt in prompts_of(4000)]
    prompts[1][0], prompts[2][-1], prompts[3][20], prompts[5][-2:] = BEGIN, 7, END, [BEGIN, END]
    options = PACKED | {"speculative": MTP(k=3)}

    def greedy_of(engine: Engine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
        return [result.token_ids for result in engine.generate(prompts, greedy(16))]

    with open_engine(**options) as engine:
        strict = greedy_of(engine, prompts)
    relaxed = RelaxedAcceptance(topk=50, delta=1.0, begin_token_ids=[BEGIN], end_token_ids=[END])
    with open_engine(**options, relaxed_acceptance=relaxed) as engine:
        alone = [greedy_of(engine, [prompt])[0] for prompt in prompts]
        assert not engine.counters["packed_chunks"]
        acceptance = engine.acceptance
    with open_engine(**options, relaxed_acceptance=relaxed) as engine:
        assert greedy_of(engine, prompts) == alone
        assert engine.counters["packed_chunks"] >= 2
        assert engine.acceptance == acceptance
    plain = [one == other for one, other in zip(alone, strict, strict=True)]
    assert [place for place, same in enumerate(plain) if same] == [2, 5]


ONE_ROW: dict[str, Any] = {"gate": GateOptions(max_live=1), "buckets": (1, 4)}


def test_more_prompts_than_rows_that_draft() -> None:
    options = PACKED | ONE_ROW | {"speculative": MTP(tree=TREE)}
    check_alike(lambda: open_engine(**options), gated=True)


def test_drafts_after_so_many_prompts_do_not_fit() -> None:
    many = {"max_batch": 32, "buckets": (1, 32), "prompts_per_prefill": 32}
    message = (
        "prompts_per_prefill=32 drafts with 96 lanes after 32 prompts, 3 for each, and at most 64 "
        "fit: prompts_per_prefill=21 does"
    )
    with pytest.raises(ValueError, match=message):
        open_engine(**PACKED | ONE_ROW | many | {"speculative": MTP(tree=BEST)})


@pytest.fixture(scope="module")
def of_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_agreeing(tmp_path_factory.mktemp("vanilla"))


@pytest.mark.parametrize(
    "options",
    [{"prefix_caching": True, "lookahead": 2}, {"max_seq_len": 64, "kv_blocks": 8}],
    ids=str,
)
@pytest.mark.parametrize("feed", ["chained", "target"])
def test_drafts_of_several_modules(of_modules: Path, feed: Feed, options: dict[str, Any]) -> None:
    """Each module's rows of a chunk begin in the prompt's chunk before."""
    options = PACKED | options | {"speculative": MTP(k=3, style="vanilla", feed=feed)}
    pauses = "kv_blocks" in options
    check_alike(lambda: open_engine(of_modules, **options), vocabulary=97, pauses=pauses)
