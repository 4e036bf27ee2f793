"""The lists of graphs and mailboxes, written out."""

from __future__ import annotations

from graphengine import EngineConfig
from graphengine.buckets import BucketLadder
from graphengine.opening.inventory import Rings, RingShape, graph_keys, mailboxes
from graphengine.speculative import MTP, GateOptions

ROWS, CHUNKS = BucketLadder(4, (1, 2, 4)), BucketLadder(32, (8, 32))
DRAFTING = EngineConfig(device="cpu", max_batch=4, buckets=(1, 2, 4), speculative=MTP(k=2))


def names(config: EngineConfig) -> list[str]:
    lengths = tuple(sorted({0, config.drafts}))
    return [key.name for key in graph_keys(config, ROWS, CHUNKS, lengths)]


def of_kind(kind: str, found: list[str]) -> list[str]:
    return [name for name in found if name.startswith(kind)]


def test_the_graphs_of_a_plain_engine_in_their_order() -> None:
    """Each kind has its largest first, and each size its full graph first."""
    config = EngineConfig(device="cpu", max_batch=4, buckets=(1, 2, 4))
    prefill = ["prefill/32/full", "prefill/32", "prefill/8/full", "prefill/8", "prefill/32/note"]
    decode = [f"decode/{rows}/{sampler}" for rows in (4, 2, 1) for sampler in ("full", "fast")]
    assert names(config) == [*prefill, *decode]
    asking = EngineConfig(device="cpu", max_batch=4, buckets=(1, 2, 4), prompt_logprobs=True)
    assert of_kind("prefill", names(asking))[:3] == [
        "prefill/32/prompt", "prefill/32/full", "prefill/32",
    ]  # fmt: skip


def test_every_bucket_drafts_up_to_the_largest_that_may() -> None:
    assert of_kind("decode", names(DRAFTING))[::2] == [
        "decode/4/k2/full", "decode/4/full", "decode/2/k2/full", "decode/2/full",
        "decode/1/k2/full", "decode/1/full",
    ]  # fmt: skip
    gated = EngineConfig(
        device="cpu",
        max_batch=4,
        buckets=(1, 2, 4),
        speculative=MTP(k=2),
        gate=GateOptions(max_live=2),
    )
    assert of_kind("decode", names(gated))[::2] == [
        "decode/4/full", "decode/2/k2/full", "decode/2/full", "decode/1/k2/full", "decode/1/full",
    ]  # fmt: skip


def test_a_mailbox_has_an_item_for_each_token_and_one_for_the_state() -> None:
    config = EngineConfig(device="cpu", max_batch=3, lookahead=1, max_logprobs=2)
    rings = mailboxes(config, tokens_per_step=4, prefill_tokens=32)
    # Of a token's log-probabilities: two items of its own, and two for each of the others.
    assert rings == Rings(RingShape(6, 3, 5), RingShape(6, 3, 4 * 6), None)
    assert rings.tokens.nbytes == 8 * 6 * 3 * 5
    asking = EngineConfig(
        device="cpu", max_batch=3, lookahead=1, max_logprobs=2, prompt_logprobs=True
    )
    rings = mailboxes(asking, tokens_per_step=1, prefill_tokens=32)
    assert rings == Rings(RingShape(6, 3, 2), RingShape(6, 3, 6), RingShape(6, 32, 6))


def test_launches_of_several_steps_have_graphs_and_records_of_their_own() -> None:
    config = EngineConfig(device="cpu", max_batch=4, lookahead=1, steps_per_launch=7)
    assert of_kind("decode", names(config))[:4] == [
        "decode/4/x7/full", "decode/4/full", "decode/4/x7/fast", "decode/4/fast",
    ]  # fmt: skip
    assert len(names(config)) == 5 + 2 * 2 * 3
    # Two launches in flight and one to spare, each with a record for each step.
    rings = mailboxes(config, tokens_per_step=1, prefill_tokens=32)
    assert (rings.tokens.entries, rings.logprobs.entries) == (3 * 7, 3 * 7)
    # A launch of one step may have a prompt's chunk before it.
    plain = EngineConfig(device="cpu", max_batch=4, lookahead=1)
    assert plain.mailbox_entries == 3 * 2
    assert (config.staging_blocks, config.sends_in_flight) == (3, plain.sends_in_flight)
