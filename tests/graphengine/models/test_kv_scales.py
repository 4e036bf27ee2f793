"""Scales of an fp8 KV: where a checkpoint has them, what is refused, and what a prompt gives."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.few_layers import few_layers
from engines.small_engine import LONG, PROMPT, greedy, open_engine
from graphengine import Engine
from graphengine.drafters.mtp.reading import read_mtp_config
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.kv_scales import calibrate_kv_scales, scales_id
from graphengine.models.weights import StoredWeights
from graphengine.speculative import MTP, DraftModel

LAYER = "model.layers.{}.self_attn."
# The model's layers, and the one of its draft module.
PREFIXES = (LAYER.format(0), LAYER.format(1), LAYER.format(2), "mtp.layers.0.self_attn.")
# One number, one a head, and as ModelOpt has it; the last layer has none.
GOOD = {
    PREFIXES[0] + "k_scale": torch.tensor(0.25),
    PREFIXES[0] + "v_scale": torch.tensor([0.5], dtype=torch.bfloat16),
    PREFIXES[1] + "k_proj.k_scale": torch.tensor([0.02, 0.03]),
    PREFIXES[1] + "v_proj.v_scale": torch.tensor([0.004, 0.005]),
    PREFIXES[3] + "k_scale": torch.tensor(0.0625),
    PREFIXES[3] + "v_scale": torch.tensor(0.125),
}


def with_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """The demo of few layers with more tensors."""
    shutil.copytree(few_layers(), folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file)
    return folder


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tensors(tmp_path_factory.mktemp("scales") / "demo", GOOD)


def scales_of(weights: StoredWeights | None) -> list[list[list[float]]]:
    assert weights is not None
    return [scales.tolist() for scales in weights.kv_scales().values()]


def test_each_layer_has_the_checkpoints_scales_and_else_one(calibrated: Path) -> None:
    options = {"device": "cpu", "kv_dtype": "fp8", "speculative": MTP(k=1)}
    expected = torch.tensor(
        [[[0.25, 0.25], [0.5, 0.5]], [[0.02, 0.03], [0.004, 0.005]], [[1.0, 1.0], [1.0, 1.0]]]
    )
    with open_engine(calibrated, **options) as engine:
        assert list(engine.model.weights.kv_scales()) == list(PREFIXES[:3])
        assert scales_of(engine.model.weights) == expected.tolist()
        assert scales_of(engine.core.drafter.weights) == [[[0.0625] * 2, [0.125] * 2]]
        ours = engine.numerics_id
    with open_engine(device="cpu", kv_dtype="fp8") as unit:
        assert set(sum(sum(scales_of(unit.model.weights), []), [])) == {1.0}  # noqa: RUF017
        assert unit.numerics_id != ours


def test_a_draft_models_scales_are_from_its_own_checkpoint(calibrated: Path) -> None:
    options = {"device": "cpu", "kv_dtype": "fp8", "speculative": DraftModel(calibrated, k=1)}
    with open_engine(**options) as engine:
        assert scales_of(engine.model.weights)[0] == [[1.0, 1.0], [1.0, 1.0]]
        assert scales_of(engine.core.drafter.weights)[0] == [[0.25, 0.25], [0.5, 0.5]]


def test_other_kinds_of_kv_ignore_the_scales(
    calibrated: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And say so in the log."""

    def run(engine: Engine) -> tuple[tuple[int, ...], str]:
        return engine.generate(PROMPT, greedy(12)).token_ids, engine.numerics_id

    with (
        caplog.at_level(logging.INFO, "graphengine"),
        open_engine(calibrated, device="cpu") as with_scales,
        open_engine(device="cpu") as without,
    ):
        assert run(with_scales) == run(without)
    unused = [message for message in caplog.messages if "does not use" in message]
    assert LAYER.format(1) + "k_proj.k_scale" in unused[0]
    assert "k_scale" not in unused[1]
    # A draft module with scales is no other formula.
    assert read_mtp_config(Checkpoint.open(calibrated)).modules == 1


K, V, PROJ_K = (f"{PREFIXES[1]}{name}" for name in ("k_scale", "v_scale", "k_proj.k_scale"))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({K: torch.ones(())}, r"1\.self_attn\.k_scale, but no scale for the values of model\.la"),
        ({V: torch.ones(())}, r"1\.self_attn\.v_scale, but no scale for the keys of model\.layer"),
        ({K: torch.ones(3), V: torch.ones(1)}, r"k_scale of shape \[3\]: .* each of 2 kv heads"),
        ({K: torch.ones(()), V: torch.tensor([1.0, 0.0])}, "v_scale with 0: a scale is positive"),
        ({K: torch.tensor(-1.0), V: torch.ones(())}, "k_scale with -1: a scale is positive"),
        (
            {K: torch.tensor(torch.nan), V: torch.ones(())},
            "k_scale has 1 of 1 numbers that",
        ),
        (
            {K: torch.tensor(torch.inf), V: torch.ones(())},
            "k_scale has 1 of 1 numbers that",
        ),
        (
            {K: torch.ones(()), V: torch.tensor(5e-9)},
            r"1\.self_attn\.v_scale with 5e-09: a scale is positive, in \[1e-08, 10000\]",
        ),
        (
            {K: torch.tensor([1.0, 10_001.0]), V: torch.ones(())},
            r"1\.self_attn\.k_scale with 10001: a scale is positive, in \[1e-08, 10000\]",
        ),
        (
            {K: torch.tensor(0.5), V: torch.ones(()), PROJ_K: torch.tensor([0.25])},
            r"two scales for the same KV, and they differ: model\.layers\.1\.self_attn\.k_scale="
            r"0\.5, model\.layers\.1\.self_attn\.k_proj\.k_scale=\[0\.25\]",
        ),
        (
            {K: torch.tensor(0.5), V: torch.ones(()), PROJ_K: torch.tensor([0.5, 0.25])},
            r"they differ: .*k_scale=0\.5, .*k_proj\.k_scale=\[0\.5, 0\.25\]",
        ),
        (
            {K: torch.ones(()), V: torch.ones(()), PROJ_K: torch.tensor(0.0)},
            r"k_proj\.k_scale with 0: a scale is positive",
        ),
        ({K: torch.ones((), dtype=torch.int32), V: torch.ones(())}, "of another dtype than F32"),
    ],
)
def test_scales_that_cannot_be_are_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    path = with_tensors(tmp_path / "demo", tensors)
    with pytest.raises(ValueError, match=message):
        open_engine(path, device="cpu", kv_dtype="fp8")


def test_a_scale_may_be_stored_under_both_names_and_be_small_or_large(tmp_path: Path) -> None:
    tensors = {
        K: torch.tensor(0.5), PROJ_K: torch.tensor([0.5, 0.5], dtype=torch.bfloat16),
        V: torch.tensor([2e-8, 1e4]),
    }  # fmt: skip
    path = with_tensors(tmp_path / "demo", tensors)
    with open_engine(path, device="cpu", kv_dtype="fp8") as engine:
        expected = torch.tensor([[0.5, 0.5], [2e-8, 1e4]]).tolist()
        assert scales_of(engine.model.weights)[1] == expected


# From a prompt.


@pytest.mark.parametrize("speculative", [None, MTP(k=2), "model"], ids=["plain", "eagle", "model"])
def test_the_largest_of_each_head_becomes_the_largest_of_e4m3(speculative: object) -> None:
    """The prompt has several chunks, which the engine then prefills; its drafter's KV gets scales,
    too.
    """
    if speculative == "model":
        speculative = DraftModel(few_layers(), k=1)
    options = {"device": "cpu", "kv_dtype": "fp8", "speculative": speculative}
    with open_engine(**options, kv_calibration=LONG) as engine, engine.session() as session:
        session.append(LONG)
        session.generate(greedy(1, ignore_eos=True))
        block = engine.memory.block_size
        assert len(session) > 32, "it is one chunk"
        for (cache, _), weights in zip(
            engine.runtime.caches, (engine.model.weights, engine.core.drafter.weights), strict=False
        ):
            # The prompt is in the first blocks of the pool; its last one holds drafts, too.
            used = cache[:, 1 : 2 + (len(session) - 1) // block].float().abs()
            largest = used.amax(dim=(1, 3, 5))
            assert bool((largest > 400).all()) and bool((largest <= 448).all())
            assert bool((torch.tensor(scales_of(weights)) < 1).all())


def test_equal_prompts_give_equal_scales_and_another_one_gives_others() -> None:
    options = {"device": "cpu", "kv_dtype": "fp8"}
    found = []
    for prompt in (LONG, LONG, [5, 6, 7]):
        with open_engine(**options, kv_calibration=prompt) as engine:
            found.append((scales_of(engine.model.weights), engine.numerics_id))
    assert found[0] == found[1] and found[0][0] != found[2][0] and found[0][1] != found[2][1]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            range(128),
            r"kv_calibration=range\(0, 128\) has 128 tokens: max_seq_len=128 has room for 127 and "
            r"a new one",
        ),
        (
            LONG * 9,
            r"kv_calibration='import os\\n.*\.\.\. has \d{3} tokens: max_seq_len=128 has room",
        ),
        (
            [5, 10**6],
            r"kv_calibration=\(5, 1000000\) has token id 1000000 at index 1: the vocabulary has 40",
        ),
        ("", "kv_calibration='' holds no token"),
        ("x\ud800", r"kv_calibration: text to encode has a lone surrogate '\\ud800' at 1"),
    ],
)
def test_prompts_that_cannot_calibrate_are_refused_before_weights_are_loaded(
    prompt: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_engine(device="cpu", kv_dtype="fp8", kv_calibration=prompt, progress=pytest.fail)


def test_ids_need_no_tokenizer_and_text_does(tmp_path: Path) -> None:
    path = tmp_path / "demo"
    shutil.copytree(few_layers(), path, ignore=shutil.ignore_patterns("tokenizer*"))
    options = {"device": "cpu", "kv_dtype": "fp8"}
    message = "kv_calibration='x = 1' is text, but the checkpoint has no tokenizer.json: give token"
    with pytest.raises(ValueError, match=message):
        open_engine(path, **options, kv_calibration="x = 1", progress=pytest.fail)
    with open_engine(path, **options, kv_calibration=[5, 6]) as engine:
        assert bool((torch.tensor(scales_of(engine.model.weights)) < 1).all())


def test_a_head_of_zeros_has_the_scale_one_and_no_other_is_made_of_nan() -> None:
    with open_engine(device="cpu", kv_dtype="fp8") as engine:
        weights = engine.model.weights
        before = scales_id(weights.kv_scales().values())
        cache = torch.zeros(3, 1, 2, 8, *engine.cache.shape[-2:])
        cache[1, 0, 1, 3, 0, 5] = -44.8
        calibrate_kv_scales(weights, cache)
        found = torch.tensor(scales_of(weights))
        assert float(found[1, 1, 0]) == pytest.approx(0.1)
        found[1, 1, 0] = 1.0
        assert bool((found == 1.0).all()) and scales_id(weights.kv_scales().values()) != before
        cache[2, 0, 0, 0, 0, 0] = torch.nan
        with pytest.raises(
            ValueError, match=r"keys and values of model\.layers\.2\.self_attn reach"
        ):
            calibrate_kv_scales(weights, cache)
