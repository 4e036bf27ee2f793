"""RoPE of three axes (M-RoPE): tokens after pictures and videos, against transformers' models with
their own vision towers."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.tower_models import END, GRIDS, PATCH, START, VIDEO
from engines.small_engine import assert_idle, greedy, open_engine, run
from engines.towers import IMAGE
from extent import examples, extent
from graphengine import GridEmbeds, NGram, PromptParts, SamplingParams, SessionSnapshot
from graphengine.core.snapshots import _digests
from graphengine.kernels.norm_rope.rope_config import RopeConfig, rope_axes
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import unknown_keys
from graphengine.prompt_embeds import EMBEDDED, Embeds, EmbedsSpec, Grid, Run, grid_at

SIZES: dict[str, Any] = {"dtype": "float32", "prompt_embeds": True}
SAID = 24


@dataclass(frozen=True)
class Oracle:
    """A model of transformers, as it is in its folder."""

    model: Any
    path: Path

    def features(
        self, kind: str, grid: tuple[int, int, int], seed: int, step: float = 1.0
    ) -> tuple[Tensor, GridEmbeds]:
        """Random pixels of a picture or video of `grid` merged places, and its embeddings."""
        patches = torch.tensor([[grid[0], 2 * grid[1], 2 * grid[2]]])
        width = 3 * PATCH["temporal_patch_size"] * PATCH["patch_size"] ** 2
        dice = torch.Generator().manual_seed(seed)
        pixels = torch.randn(int(patches.prod()), width, generator=dice)
        get = getattr(self.model.model, f"get_{kind}_features")
        with torch.no_grad():
            found = get(pixels, patches)
        levels = getattr(found, "deepstack_features", None)
        deepstack = None
        if levels:
            # A level is one tensor, or, in newer releases, one for each image.
            joined = [each if torch.is_tensor(each) else torch.cat(each) for each in levels]
            deepstack = torch.stack(joined)
        rows = torch.cat(tuple(found.pooler_output))
        return pixels, GridEmbeds(rows, grid, time_step=step, deepstack=deepstack)

    def blank(self, grid: tuple[int, int, int], step: float) -> GridEmbeds:
        """Four embeddings of zeros."""
        deepstack = torch.zeros(2, 4, 192) if "qwen3_vl" in self.path.name else None
        return GridEmbeds(torch.zeros(4, 192), grid, time_step=step, deepstack=deepstack)

    def says(self, ids: Sequence[int], **pixels: Any) -> list[int]:
        """Greedy tokens after these ids, among which `IMAGE` and `VIDEO` are places."""
        kinds = [int(each == IMAGE) + 2 * int(each == VIDEO) for each in ids]
        with torch.no_grad():
            made = self.model.generate(
                input_ids=torch.tensor([ids]),
                mm_token_type_ids=torch.tensor([kinds]),
                max_new_tokens=SAID,
                min_new_tokens=SAID,
                do_sample=False,
                **pixels,
            )
        said: list[int] = made[0, len(ids) :].tolist()
        return said


@pytest.fixture(scope="module", params=extent([*GRIDS][:3] + [*GRIDS][4:], [*GRIDS]))
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    torch.manual_seed(7)
    model = GRIDS[request.param]().eval()
    # Random weights that say more than one token.
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2 if "visual" not in name else 0.3)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return Oracle(model, folder)


def test_tokens_after_pictures_are_those_of_transformers(oracle: Oracle, device: str) -> None:
    """Two pictures in one prompt, fed in one chunk and in several; text before, between, after."""
    pixels, first = oracle.features("image", (1, 3, 5), 1)
    others, second = oracle.features("image", (1, 4, 2), 2)
    head, middle, tail = [5, 17, 8, START], [END, 31, 40, START], [END, 9, 77, 5, 17]
    ids = [*head, *[IMAGE] * 15, *middle, *[IMAGE] * 8, *tail]
    wanted = oracle.says(
        ids,
        pixel_values=torch.cat([pixels, others]),
        image_grid_thw=torch.tensor([[1, 6, 10], [1, 8, 4]]),
    )
    assert len(set(wanted)) > 3
    prompt = PromptParts(head, first, middle, second, tail)
    plain = PromptParts(head, first.rows, middle, second.rows, tail)
    for buckets in ([64], [8]):
        with open_engine(oracle.path, device=device, prefill_buckets=buckets, **SIZES) as engine:
            assert engine.generate(prompt, greedy(SAID)).token_ids == tuple(wanted)
            # Without their places the same rows are another prompt.
            assert engine.generate(plain, greedy(SAID)).token_ids != tuple(wanted)
            assert_idle(engine)


def test_tokens_after_a_video_are_those_of_transformers(oracle: Oracle, device: str) -> None:
    if "qwen3" in oracle.path.name:
        pytest.skip("its videos are pictures with times in text between them")
    if "2_5" in oracle.path.name and Version(transformers.__version__) < Version("5.20"):
        pytest.skip("older versions count the times of a video otherwise")
    ids = [5, 17, START, *[VIDEO] * 24, END, 8, 9]
    more, step = {}, 1.0
    if "2_5" in oracle.path.name:
        more, step = {"second_per_grid_ts": torch.tensor([0.5])}, 1.5
    pixels, video = oracle.features("video", (3, 2, 4), 3, step)
    wanted = oracle.says(
        ids, pixel_values_videos=pixels, video_grid_thw=torch.tensor([[3, 4, 8]]), **more
    )
    prompt = PromptParts(ids[:3], video, ids[-3:])
    with open_engine(oracle.path, device=device, prefill_buckets=[16], **SIZES) as engine:
        assert engine.generate(prompt, greedy(SAID)).token_ids == tuple(wanted)


def test_a_published_config_has_the_language_models_keys_beside_the_towers(
    oracle: Oracle, device: str, tmp_path: Path
) -> None:
    """Qwen2-VL's and Qwen2.5-VL's, whose axes stand in `rope_scaling`."""
    if "qwen3" in oracle.path.name:
        pytest.skip("it has them under text_config")
    config = json.loads((oracle.path / "config.json").read_text())
    text = config.pop("text_config")
    sections = text.pop("rope_parameters")["mrope_section"]
    scaling = {"type": "mrope", "mrope_section": sections}
    flat = text | config | {"rope_theta": 1e4, "rope_scaling": scaling}
    for file in oracle.path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(flat))
    prompt = _prompts(oracle)[0]
    said = []
    for path in (oracle.path, tmp_path):
        with open_engine(path, device=device, **SIZES) as engine:
            said.append(engine.generate(prompt, greedy(8)).token_ids)
    assert said[0] == said[1]


def _prompts(oracle: Oracle) -> list[Any]:
    """Prompts with a picture, with a larger one, and of text alone."""
    _, small = oracle.features("image", (1, 2, 3), 4)
    _, large = oracle.features("image", (1, 6, 5), 5)
    return [
        PromptParts([5, 17, START], small, [END, 8, 17, 8]),
        [5, 17, 8, 31, 8, 17, 40],
        PromptParts([9], large, [8, 31, 8, 31]),
    ]


def test_neighbours_pauses_and_drafts_change_no_token(oracle: Oracle, device: str) -> None:
    prompts = _prompts(oracle)
    with open_engine(oracle.path, device=device, max_batch=1, **SIZES) as engine:
        alone = [engine.generate(each, greedy(SAID)).token_ids for each in prompts]
    assert len(set(alone)) == 3
    options: dict[str, Any] = {"max_batch": 3, **SIZES}
    for more in (
        {},
        {"speculative": NGram(k=3)},
        # Too few blocks for all three: one is paused.
        {"kv_blocks": 11, "block_size": 8, "swap_blocks": 32, "max_seq_len": 64},
    ):
        with open_engine(oracle.path, device=device, **options, **more) as engine:
            together = [each.token_ids for each in engine.generate(prompts, greedy(SAID))]
            assert together == alone, more
            if "kv_blocks" in more:
                assert engine.counters["pauses"] > 0
            # Drafts may have been launched past the end.
            run(engine)
            assert_idle(engine)


def wrong_places(kept: SessionSnapshot) -> list[tuple[SessionSnapshot, str]]:
    """Snapshots with other places, whose digests were made anew."""
    (place,) = kept.places
    assert place.grid is not None
    several = [
        (place._replace(start=3), r"20 embeddings at 20 places, .* \[3, 4, 5\], for 20 .* \[2, 3"),
        (place._replace(length=19), "20 embeddings at 19 places"),
        (place._replace(grid=None, length=10**15), "20 embeddings at 21 places"),
        (place._replace(grid=place.grid._replace(height=0)), r"Grid\(.*height=0.* must have sizes"),
        (place._replace(grid=place.grid._replace(step=-1.0)), "and a step from 0 to 1e6"),
        (place._replace(grid=place.grid._replace(width=2)), "20 embeddings for the 8 places of G"),
        (place._replace(image=True), "an image of 20 embeddings at position 2: .* at most 0 of"),
    ]
    found = [(dataclasses.replace(kept, places=(each,)), message) for each, message in several]
    remade = [(dataclasses.replace(each, digests=dict(_digests(each))), m) for each, m in found]
    return [*remade, (found[0][0], "places of the session is not what was kept")]


def test_a_session_goes_on_after_a_picture(oracle: Oracle, device: str, tmp_path: Path) -> None:
    """A turn after a picture, and one after another picture in its place, as whole prompts."""
    _, picture = oracle.features("image", (1, 4, 5), 6)
    with open_engine(oracle.path, device=device, **SIZES) as engine:
        session = engine.session()
        session.append(PromptParts([5, START], picture, [END, 9]))
        first = session.generate(greedy(SAID)).token_ids
        session.append([44, 45])
        second = session.generate(greedy(SAID)).token_ids
        whole = PromptParts([5, START], picture, [END, 9, *first, 44, 45])
        assert engine.generate(whole, greedy(SAID)).token_ids == second
        kept = session.snapshot()
        copy = engine.restore_session(kept)
        for each in (session, copy):
            each.append([44])
        third = session.generate(greedy(SAID))
        again = copy.generate(greedy(SAID))
        assert again.token_ids == third.token_ids and again.cached_tokens > 0
        copy.close()
        # Cut inside the picture, and through a file.
        session.rewind(len(session) - 9)
        session.snapshot(tmp_path / "cut.safetensors")
        copy = engine.restore_session(tmp_path / "cut.safetensors")
        for each in (session, copy):
            each.append([44, 45])
        assert copy.generate(greedy(9)).token_ids == session.generate(greedy(9)).token_ids
        copy.close()
        for wrong, message in wrong_places(kept):
            with pytest.raises(ValueError, match=message):
                engine.restore_session(wrong)
        # The same rows on another grid have other keys from the first row on.
        longer = GridEmbeds(picture.rows, (20, 1, 1), time_step=4.0, deepstack=picture.deepstack)
        changed = PromptParts([5, START], longer, [END, 9])
        session.update(changed)
        again = session.generate(greedy(SAID)).token_ids
        assert again != first
        assert engine.generate(changed, greedy(SAID)).token_ids == again
        session.close()


@pytest.mark.parametrize(
    ("sections", "interleaved", "axes"),
    [
        ((1, 2, 1), False, (0, 1, 1, 2)),
        ((2, 1, 1), True, (0, 1, 2, 0)),
        ((4, 0, 0), True, (0, 0, 0, 0)),
        ((0, 2, 2), True, (0, 1, 2, 0)),
    ],
)
def test_axes_of_pairs(
    sections: tuple[int, int, int], interleaved: bool, axes: tuple[int, ...]
) -> None:
    rope = RopeConfig(sections=sections, interleaved=interleaved)
    assert rope_axes(rope, head_dim=8) == axes
    half = RopeConfig(sections=sections, interleaved=interleaved, rotated=0.5)
    assert rope_axes(half, head_dim=16) == (*axes, 0, 0, 0, 0)


def test_sections_of_another_size_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(1, 2, 2\) must add up to 4 pairs"):
        rope_axes(RopeConfig(sections=(1, 2, 2)), head_dim=8)


def _counted(parts: Sequence[tuple[int, int, int] | int]) -> tuple[Embeds, list[list[int]], int]:
    """Embeddings, their rows of the tables counted one by one, and how many positions there are."""
    rows: list[list[int]] = []
    embeds, following = Embeds(), 0
    for part in parts:
        if isinstance(part, int):
            rows += [[following + index] * 3 for index in range(part)]
            following += part
            continue
        start, n = len(rows), part[0] * part[1] * part[2]
        rows += [
            [following + t, following + h, following + w]
            for t in range(part[0])
            for h in range(part[1])
            for w in range(part[2])
        ]
        following += max(part)
        embeds = embeds.then(Embeds((Run(start, torch.zeros(n, 2), Grid(*part)),)))
    return embeds, rows, following


@settings(deadline=None, max_examples=examples(40, 200))
@given(st.lists(st.integers(0, 5) | st.tuples(*[st.integers(1, 4)] * 3), max_size=5), st.data())
def test_rows_are_those_counted_one_by_one(
    parts: list[tuple[int, int, int] | int], data: st.DataObject
) -> None:
    embeds, rows, following = _counted(parts)
    assert embeds.shift() == following - len(rows)
    rows += [[following + index] * 3 for index in range(4)]
    first = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(first, len(rows)))
    assert embeds.rope_rows(first, stop).tolist() == rows[first:stop]
    # Runs that were cut and put together again are what they were.
    at = data.draw(st.integers(0, len(rows)))
    joined = embeds.within(0, at).then(embeds.within(at, len(rows)))
    assert np.array_equal(joined.rope_rows(0, len(rows)), embeds.rope_rows(0, len(rows)))
    assert joined.identity([EMBEDDED] * len(rows)) == embeds.identity([EMBEDDED] * len(rows))


def test_the_same_rows_on_another_grid_are_others() -> None:
    rows = torch.ones(6, 2)
    kinds = [None, Grid(1, 2, 3), Grid(1, 3, 2), Grid(1, 2, 3, 2.0)]
    ids = [EMBEDDED] * 6
    digests = {Embeds((Run(0, rows, grid),)).identity(ids).tobytes() for grid in kinds}
    assert len(digests) == 4


SPEC = EmbedsSpec(4, torch.float32, grids=True)


@pytest.mark.parametrize(
    ("grid", "step", "spec", "message"),
    [
        ((1, 2, 3), 1.0, SPEC, r"grid=\(1, 2, 3\) has 6 places for 8 embeddings"),
        ((1, 2), 1.0, SPEC, r"grid=\(1, 2\) must be three sizes of 1 or more"),
        ((0, 2, 4), 1.0, SPEC, r"grid=\(0, 2, 4\) must be three sizes of 1 or more"),
        ((1, 2, 4.0), 1.0, SPEC, r"grid=\(1, 2, 4.0\) must be three sizes of 1 or more"),
        ((1, 2, 4), -1, SPEC, "time_step=-1 must be a number from 0 to 1e6"),
        ((1, 2, 4), "x", SPEC, "time_step='x' must be a number from 0 to 1e6"),
        ((1, 2, 4), 1.0, EmbedsSpec(4, torch.float32), r"whose positions have three axes"),
        ((1, 2, 4), 1.0, None, "an engine that is opened with prompt_embeds=True"),
    ],
)
def test_wrong_grids_are_named(grid: Any, step: Any, spec: EmbedsSpec | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grid_at(GridEmbeds(torch.zeros(8, 4), grid, time_step=step), 0, spec)


@pytest.mark.parametrize("rows", [[[0.0] * 4] * 8, None, np.zeros((8, 4))])
def test_rows_that_are_no_tensor_are_named(rows: Any) -> None:
    with pytest.raises(ValueError, match=r"of a grid must be a tensor \[n, H\]"):
        grid_at(GridEmbeds(rows, (1, 2, 4)), 0, SPEC)


def test_a_grid_without_rows_is_no_empty_part(oracle: Oracle) -> None:
    with open_engine(oracle.path, device="cpu", max_seq_len=64, **SIZES) as engine:
        prompt = PromptParts([1], GridEmbeds(torch.zeros(0, 192), (1, 2, 3)), [2])
        with pytest.raises(ValueError, match="has 6 places for 0 embeddings"):
            engine.submit(prompt, greedy(4))


def test_a_long_video_leaves_less_room(oracle: Oracle) -> None:
    """Its rows of the tables are fewer than those that are left: replies end there."""
    with open_engine(oracle.path, device="cpu", max_seq_len=64, **SIZES) as engine:
        prompt = PromptParts([1], oracle.blank((4, 1, 1), 8.0), [2])
        # Rows 1, 9, 17 and 25, and then 26 for the last token.
        for params in (SamplingParams(temperature=0.0, max_tokens=None), greedy(60)):
            result = engine.generate(prompt, dataclasses.replace(params, ignore_eos=True))
            assert len(result.token_ids) == 64 - 27


def test_a_grid_past_the_tables_is_refused(oracle: Oracle) -> None:
    with open_engine(oracle.path, device="cpu", max_seq_len=64, **SIZES) as engine:
        prompt = PromptParts([1], oracle.blank((2, 1, 2), 80.0), [2])
        with pytest.raises(ValueError, match=r"take RoPE to row 8\d, past max_seq_len=64"):
            engine.submit(prompt, greedy(4))
        assert not engine.busy


# DeepStack.


def test_features_of_a_picture_count(oracle: Oracle, device: str) -> None:
    """Others give another reply; a tensor alone has none, as if they were zeros."""
    if "qwen3_vl" not in oracle.path.name:
        pytest.skip("it adds none")
    _, picture = oracle.features("image", (1, 4, 5), 6)
    assert picture.deepstack is not None
    options: dict[str, Any] = {"prefix_caching": True, **SIZES}
    with open_engine(oracle.path, device=device, **options) as engine:

        def said(part: Any) -> Any:
            return engine.generate(PromptParts([5, START], part, [END, 9]), greedy(SAID))

        first, again = said(picture), said(picture)
        assert (first.cached_tokens, again.cached_tokens) == (0, 16)
        assert again.token_ids == first.token_ids
        for level in range(2):
            other = picture.deepstack.clone()
            other[level, 9] *= -30
            changed = said(GridEmbeds(picture.rows, (1, 4, 5), deepstack=other))
            assert changed.token_ids != first.token_ids and changed.cached_tokens == 8
        line = GridEmbeds(picture.rows, (20, 1, 1), deepstack=torch.zeros(2, 20, 192))
        places = GridEmbeds(picture.rows, (1, 1, 20), deepstack=torch.zeros(2, 20, 192))
        assert len({said(each).token_ids for each in (line, places, picture)}) == 3
        assert said(picture.rows).token_ids != first.token_ids


@pytest.mark.parametrize(
    ("deepstack", "levels", "message"),
    [
        (torch.zeros(3, 6, 4), 2, r"deepstack of shape \[3, 6, 4\]: .* \[2, 6, 4\] with this grid"),
        (torch.zeros(2, 5, 4), 2, r"deepstack of shape \[2, 5, 4\]: .* \[2, 6, 4\] with this grid"),
        (torch.zeros(2, 6, 8), 2, r"deepstack of shape \[2, 6, 8\]: .* \[2, 6, 4\] with this grid"),
        (torch.zeros(2, 6, 4).int(), 2, r"deepstack of shape .* takes floating point \[2, 6, 4\]"),
        (torch.zeros(2, 6, 4).to_sparse(), 2, "deepstack must be dense, .* of torch.sparse_coo"),
        (
            torch.zeros(2, 6, 4, device="meta"),
            2,
            "deepstack must be dense, with .* on meta",
        ),
        (
            torch.nested.nested_tensor([torch.zeros(6, 4)] * 2, layout=torch.jagged),
            2,
            "deepstack must be dense, with values, not a nested tensor",
        ),
        (None, 2, r"deepstack=None: the model takes floating point \[2, 6, 4\]"),
        ([1.0], 2, r"deepstack=\[1.0\]: the model takes floating point \[2, 6, 4\]"),
        (torch.zeros(2, 6, 4), 0, r"deepstack of shape \[2, 6, 4\]: this model adds no features"),
        (
            torch.zeros(2, 6, 4).index_fill(0, torch.tensor([1]), math.inf),
            2,
            r"deepstack of shape \[2, 6, 4\]: row 0 of level 1 is not finite in torch.float32",
        ),
    ],
)
def test_wrong_features_are_named(deepstack: Any, levels: int, message: str) -> None:
    spec = SPEC._replace(levels=levels)
    with pytest.raises(ValueError, match=message):
        grid_at(GridEmbeds(torch.zeros(6, 4), (1, 2, 3), deepstack=deepstack), 0, spec)


def test_rows_are_an_embedding_and_then_its_features() -> None:
    spec = SPEC._replace(levels=2)
    given = torch.arange(24.0).view(2, 3, 4)
    part = GridEmbeds(torch.ones(3, 4), (1, 1, 3), deepstack=given)
    (run,) = grid_at(part, 5, spec).runs
    assert run.rows.tolist() == torch.cat([torch.ones(3, 4), *given], dim=1).tolist()


QWEN3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655,
    "model_type": "qwen3_vl", "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 9728,
        "max_position_embeddings": 262144, "model_type": "qwen3_vl_text",
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": {
            "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default",
        },
        "rope_theta": 5000000, "tie_word_embeddings": True, "use_cache": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True, "transformers_version": "4.57.0.dev0", "video_token_id": 151656,
    "vision_config": {"deepstack_visual_indexes": [5, 11, 17], "depth": 24},
    "vision_end_token_id": 151653, "vision_start_token_id": 151652,
}  # fmt: skip
"""The keys of Qwen3-VL-4B-Instruct."""


def test_qwen3_vl_as_it_is_published() -> None:
    assert unknown_keys(QWEN3_VL) == []
    model = read_model_config(QWEN3_VL)
    assert (model.num_layers, model.deepstack, model.tie_embeddings) == (36, 3, True)
    axes = model.rope_axes
    assert axes is not None and axes[:6] == (0, 1, 2) * 2 and axes[60:] == (0,) * 4
    assert [axes.count(axis) for axis in range(3)] == [24, 20, 20]


def test_more_levels_than_layers_are_refused() -> None:
    config = QWEN3_VL | {"vision_config": {"deepstack_visual_indexes": [*range(36)]}}
    with pytest.raises(ValueError, match=r"fewer levels than num_hidden_layers=36"):
        read_model_config(config)


def test_experts_are_published_with_inputs_first(
    oracle: Oracle, device: str, tmp_path: Path
) -> None:
    """transformers 5 saves them the other way round, and reads both. Ranks have their part."""
    if oracle.path.name != "qwen3_vl_moe0":
        pytest.skip("it has none")
    for file in oracle.path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {
        name: each.transpose(1, 2).contiguous() if ".experts." in name else each
        for name, each in tensors.items()
    }
    assert turned["model.language_model.layers.0.mlp.experts.down_proj"].shape == (7, 44, 192)
    (tmp_path / "model.safetensors").unlink()
    save_file(turned, tmp_path / "model.safetensors")
    prompt = _prompts(oracle)[0]
    with open_engine(oracle.path, device=device, **SIZES) as engine:
        said = engine.generate(prompt, greedy(8)).token_ids
    for options in ({}, {"tensor_parallel": 2, "device": "cpu"}):
        with open_engine(tmp_path, **{"device": device, **SIZES, **options}) as engine:
            assert engine.generate(prompt, greedy(8)).token_ids == said
