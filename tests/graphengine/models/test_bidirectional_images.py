"""Images whose embeddings see each other: Gemma 3, against transformers with its own tower."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from checkpoints.tower_models import PLACES, SEEN
from engines.small_engine import assert_idle, greedy, open_engine
from engines.towers import IMAGE, SAID, Tower, new_tower
from extent import examples
from graphengine import GridEmbeds, ImageEmbeds, NGram, PromptParts
from graphengine.options.prefill_cut import PrefillCut
from graphengine.prompt_embeds import EMBEDDED, Embeds, EmbedsSpec, Image, Run, image_at

SIZES: dict[str, Any] = {"dtype": "float32", "prompt_embeds": True, "prefill_buckets": [16, 32]}


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Tower:
    folder = tmp_path_factory.mktemp("gemma3")
    return new_tower(SEEN["gemma3"], folder, embedding_std=0.03)


def pixels_of(images: int) -> Tensor:
    return torch.randn(images, 3, 40, 40, generator=torch.Generator().manual_seed(3))


def said_by(tower: Tower, ids: Sequence[int], pixels: Tensor | None) -> tuple[int, ...]:
    kinds = torch.tensor([[int(each == IMAGE) for each in ids]])
    more = {} if pixels is None else {"pixel_values": pixels}
    return tuple(tower.says(ids, token_type_ids=kinds, **more))


HEAD, MIDDLE, TAIL = [5, 17, 8, 31, 251], [252, 31, 40, 251], [252, 9, 77, 5, 17, 8, 31]


def two_images(tower: Tower) -> tuple[list[Tensor], tuple[int, ...]]:
    """Embeddings of two images, and what transformers says after a prompt with both."""
    pixels = pixels_of(2)
    rows = tower.features(pixel_values=pixels).split(PLACES)
    ids = [*HEAD, *[IMAGE] * PLACES, *MIDDLE, *[IMAGE] * PLACES, *TAIL]
    return list(rows), said_by(tower, ids, pixels)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_buckets": [64]},
        {"prefill_buckets": [8, 32], "max_prefill_tokens_per_step": 32},
        {"prefill_cut": ((0, 32), (64, 16))},
        {"speculative": NGram(k=3)},
        {"window_rings": True},
        {"max_batch": 2, "kv_blocks": 21, "swap_blocks": 48},
    ],
    ids=str,
)
def test_tokens_after_images_are_those_of_transformers(
    tower: Tower, device: str, options: dict[str, Any]
) -> None:
    (first, second), wanted = two_images(tower)
    assert len(set(wanted)) > 3
    prompt = PromptParts(HEAD, ImageEmbeds(first), MIDDLE, ImageEmbeds(second), TAIL)
    with open_engine(tower.path, device=device, **SIZES | options) as engine:
        said = engine.generate([prompt, prompt], greedy(SAID))
        assert [each.token_ids for each in said] == [wanted] * 2
        assert engine.counters["pauses"] > 0 or "kv_blocks" not in options
        # Causal attention says something else.
        causal = PromptParts(HEAD, first, MIDDLE, second, TAIL)
        assert engine.generate(causal, greedy(SAID)).token_ids != wanted
        assert_idle(engine)


@pytest.mark.parametrize("length", [1, 17, 90])
def test_text_alone(tower: Tower, device: str, length: int) -> None:
    ids = torch.randint(250, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    with open_engine(tower.path, device=device, **SIZES) as engine:
        assert engine.generate(ids, greedy(SAID)).token_ids == said_by(tower, ids, None)


def test_sessions_and_prefixes_know_whole_images(tower: Tower, device: str) -> None:
    """Text after an image is replaced; so is the image, of which only the last embedding differs;
    nothing ends inside one.
    """
    (first, second), wanted = two_images(tower)
    changed = first.clone()
    changed[-1] = second[0]
    parts = [HEAD, ImageEmbeds(first), MIDDLE, ImageEmbeds(second), TAIL]
    others = [HEAD, ImageEmbeds(changed), *parts[2:]]
    with open_engine(tower.path, device=device, **SIZES, prefix_caching=True) as engine:
        fresh = engine.generate(PromptParts(*others), greedy(SAID)).token_ids
        assert fresh != wanted
        session = engine.session()
        session.append(PromptParts(*others[:3], [4, 4]))
        session.generate(greedy(3))
        session.update(PromptParts(*parts))
        assert session.cached_tokens <= len(HEAD)
        assert session.generate(greedy(SAID)).token_ids == wanted
        session.rewind(len(session) - 5)
        session.append(PromptParts(*others[1:]))
        assert session.generate(greedy(SAID)).token_ids == fresh
        message = r"n_tokens=\d+ leaves 12 tokens, which end inside an image: .* from 5 to 29 see"
        with pytest.raises(ValueError, match=message):
            session.rewind(len(session) - 12)
        kept = session.snapshot()
        assert [place.image for place in kept.places] == [True, True]
        with engine.restore_session(kept) as copy:
            for each in (session, copy):
                each.append([4, 9])
            found = copy.generate(greedy(SAID))
            assert found.cached_tokens > 0
            assert found.token_ids == session.generate(greedy(SAID)).token_ids
            with pytest.raises(ValueError, match="which end inside an image"):
                copy.rewind(len(copy) - 12)
        session.close()
        # Blocks of the prompt are shared, those of another image are not.
        again = engine.generate(PromptParts(*parts), greedy(SAID))
        assert again.token_ids == wanted and again.cached_tokens > 40
        with open_engine(tower.path, device=device, **SIZES) as other:
            assert other.generate(PromptParts(*others), greedy(SAID)).token_ids == fresh


def test_a_prompt_may_end_with_an_image(tower: Tower, device: str) -> None:
    """The second time only its last embeddings are fed, in the middle of the image."""
    pixels = pixels_of(1)
    rows = tower.features(pixel_values=pixels)
    wanted = said_by(tower, [*HEAD, *[IMAGE] * PLACES], pixels)
    with open_engine(tower.path, device=device, **SIZES, prefix_caching=True) as engine:
        for cached in (0, 24):
            result = engine.generate(PromptParts(HEAD, ImageEmbeds(rows)), greedy(SAID))
            assert (result.token_ids, result.cached_tokens) == (wanted, cached)


# Where prompts are cut.


@settings(deadline=None, max_examples=examples(60, 400))
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 8)), max_size=5), st.integers(0, 40))
def test_no_chunk_cuts_an_image(gaps: list[tuple[int, int]], start: int) -> None:
    cut = PrefillCut(((0, 8),))
    whole, at = [], 0
    for gap, size in gaps:
        whole.append((at + gap, at + gap + size))
        at += gap + size
    length = at + 5
    ends = [0]
    while ends[-1] < length:
        ends.append(cut.end(ends[-1], length, whole))
    assert all(0 < stop - first <= 8 for first, stop in pairwise(ends))
    assert not any(first < end < stop for end in ends for first, stop in whole)
    # From the middle on, the rest is cut as a whole prompt is.
    start = min(start, length - 1)
    assert cut.end(start, length, whole) == min(end for end in ends if end > start)


def test_images_stay_whole_when_runs_are_cut() -> None:
    image = Image(5, b"digest")
    rows = torch.arange(10.0).view(5, 2)
    embeds = Embeds((Run(3, rows, image=image), Run(9, rows[:2])))
    assert embeds.images() == ((3, 8),)
    assert embeds.seen(1, 11).tolist() == [2, 3, 8, 8, 8, 8, 8, 9, 10, 11]
    assert embeds.seen(5, 7).tolist() == [8, 8]
    joined = embeds.within(0, 5).then(embeds.within(5, 20))
    assert joined.images() == ((3, 8),)
    ids = [EMBEDDED] * 11
    assert joined.identity(ids) == embeds.identity(ids)
    other = Embeds((Run(3, rows, image=image._replace(digest=b"other")), Run(9, rows[:2])))
    assert other.identity(ids)[3:8] != embeds.identity(ids)[3:8]
    assert other.identity(ids)[9:] == embeds.identity(ids)[9:]


SPEC = EmbedsSpec(4, torch.float32, images=PrefillCut(((0, 16), (32, 8))))


@pytest.mark.parametrize(
    ("rows", "position", "spec", "message"),
    [
        (torch.zeros(17, 4), 0, SPEC, "17 embeddings at position 0 .* at most 16 tokens there"),
        (torch.zeros(9, 4), 32, SPEC, "9 embeddings at position 32 .* at most 8 tokens there"),
        (torch.zeros(3, 5), 0, SPEC, r"embeddings of shape \[3, 5\] .* the model takes \[n, 4\]"),
        ([[0.0] * 4], 0, SPEC, r"rows=\[\[0.0, .* of an image must be a tensor \[n, H\]"),
        (torch.zeros(3, 4), 0, EmbedsSpec(4, torch.float32), "an image of 3 embeddings that see"),
        (torch.zeros(3, 4), 0, None, "an engine that is opened with prompt_embeds=True"),
    ],
)
def test_wrong_images_are_named(
    rows: Any, position: int, spec: EmbedsSpec | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        image_at(ImageEmbeds(rows), position, spec)


def test_an_image_is_refused_where_it_has_no_place(tower: Tower, device: str) -> None:
    assert repr(ImageEmbeds(torch.zeros(3, 4))) == "ImageEmbeds(tensor[3, 4])"
    with open_engine(tower.path, device=device, **SIZES) as engine:
        with pytest.raises(ValueError, match="an image of 33 embeddings at position 1 is fed in"):
            engine.submit(PromptParts([1], ImageEmbeds(torch.zeros(33, 192))))
        with pytest.raises(ValueError, match="whose positions have three axes"):
            engine.submit(PromptParts([1], GridEmbeds(torch.zeros(4, 192), (1, 2, 2))))
        assert engine.generate(PromptParts([1], ImageEmbeds(torch.zeros(0, 192))), greedy(1))
