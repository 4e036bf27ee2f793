"""Qwen3-Omni's talker: frames are those of transformers' own `generate`, code for code, with the
text given at submit; and what of its configs and options is read or refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.talker_models import (
    CODES,
    END,
    FIRST_CODES,
    HIDDEN,
    frames_by_hand,
    frames_of,
    write_talker,
    write_tts,
)
from engines.small_engine import assert_idle, open_engine
from extent import extent
from graphengine import Feed, GridEmbeds, PromptParts, SamplingParams
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import unknown_keys
from graphengine.program.feeds import Feeds

FRAMES = extent(8, 30)
SIZES: dict[str, Any] = {"dtype": "float32", "prompt_embeds": True, "max_seq_len": 128}
Codes = NDArray[np.integer[Any]]
_BIASES: dict[str, Any] = {"attention_bias": True, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "two codes": {"groups": 2},
    "biases": {
        "groups": 5,
        "backbone": _BIASES | {"num_hidden_layers": 3},
        "predictor": {"attention_bias": True, "vocab_size": 41},
    },
    "dense": {"groups": 4, "dense": True},
    "seventeen": {"groups": 17, "predictor": {"num_hidden_layers": 1}},
}


class Talker(NamedTuple):
    path: Path
    model: Any

    def says(self, prompt: Tensor, rows: Tensor, frames: int = FRAMES) -> Codes:
        found = frames_of(self.model, prompt, rows, PAD, frames)
        codes: Codes = found.numpy()
        return codes


def rows_of(count: int, seed: int = 0) -> Tensor:
    """Random embeddings, of a prompt or of text."""
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1000 * seed + count))


PAD = rows_of(1, seed=99)[0]


@pytest.fixture(scope="module", params=MODELS)
def talker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Talker:
    path = tmp_path_factory.mktemp("talker")
    return Talker(path, write_talker(path, **MODELS[request.param]))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Talker:
    path = tmp_path_factory.mktemp("four")
    return Talker(path, write_talker(path, 4))


def asked(rows: Tensor, frames: int = FRAMES, **options: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=frames, feed=Feed(PAD, rows), ignore_eos=True, **options
    )


def test_frames_are_those_of_transformers(talker: Talker, device: str) -> None:
    """Prompts of different lengths together, alone and in chunks; with no text, with some, and with
    more than there are frames.
    """
    # Long frames take their time.
    frames = FRAMES if talker.model.config.num_code_groups < 10 else extent(4, 20)
    prompts = [rows_of(length) for length in (2, 11, 40)]
    texts = [rows_of(count, seed=1) for count in (0, 3, frames + 4)]
    wanted = [talker.says(*each, frames) for each in zip(prompts, texts, strict=True)]
    assert len(np.unique(np.concatenate(wanted), axis=0)) > frames
    params = [asked(text, frames) for text in texts]
    for options in ({"buckets": (1, 3)}, {"prefill_buckets": (8,), "lookahead": 1}):
        with open_engine(talker.path, device=device, **SIZES | options) as engine:
            for result, expected in zip(engine.generate(prompts, params), wanted, strict=True):
                assert np.array_equal(result.codes, expected)
            assert np.array_equal(engine.generate(prompts[1], params[1]).codes, wanted[1])
            assert_idle(engine)


@pytest.mark.parametrize("steps", [3, 20])
def test_more_text_than_a_ring_holds(four: Talker, device: str, steps: int) -> None:
    prompts, texts = [rows_of(5), rows_of(3)], [rows_of(27, seed=1), rows_of(20, seed=2)]
    wanted = [four.says(*each, 30) for each in zip(prompts, texts, strict=True)]
    options = {"steps_per_launch": steps, "lookahead": 1}
    with open_engine(four.path, device=device, **SIZES | options) as engine:
        results = engine.generate(prompts, [asked(text, 30) for text in texts])
        for result, expected in zip(results, wanted, strict=True):
            assert np.array_equal(result.codes, expected)


def test_a_slot_forgets_the_text_of_its_last_request(four: Talker, device: str) -> None:
    """The second request has another pad and no text, at positions that had some."""
    prompt, pad = rows_of(5), rows_of(1, seed=7)[0]
    wanted = frames_of(four.model, prompt, rows_of(0), pad, FRAMES).numpy()
    with open_engine(four.path, device=device, **SIZES, max_batch=1) as engine:
        engine.generate(prompt, asked(rows_of(30, seed=1)))
        params = SamplingParams(temperature=0.0, max_tokens=FRAMES, feed=Feed(pad))
        assert np.array_equal(engine.generate(prompt, params).codes, wanted)


@pytest.mark.parametrize("shift", [1, -1])
def test_a_row_at_the_wrong_frame_shows(
    four: Talker, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    put = Feeds._put
    prompt, text = rows_of(5), rows_of(6, seed=1)
    wanted = four.says(prompt, text)

    def misplace(self: Feeds, slot: int, place: int, row: Any) -> None:
        put(self, slot, place if place == self._ring else (place + shift) % self._ring, row)

    monkeypatch.setattr(Feeds, "_put", misplace)
    with open_engine(four.path, device="cpu", **SIZES) as engine:
        assert not np.array_equal(engine.generate(prompt, asked(text)).codes, wanted)


def test_requests_pause_in_the_middle_of_their_text(four: Talker, device: str) -> None:
    lengths = (40, 30, 20)
    prompts, texts = [rows_of(n) for n in lengths], [rows_of(n, seed=1) for n in (22, 9, 31)]
    wanted = [four.says(*each, 26) for each in zip(prompts, texts, strict=True)]
    blocks = sum(-(-length // 8) for length in lengths) + 3
    pool = {"kv_blocks": blocks, "swap_blocks": 2 * blocks, "max_seq_len": 80}
    with open_engine(four.path, device=device, **SIZES | pool) as engine:
        results = engine.generate(prompts, [asked(text, 26) for text in texts])
        assert engine.counters["pauses"] >= 1 and engine.counters["resumes"] >= 1
        for result, expected in zip(results, wanted, strict=True):
            assert np.array_equal(result.codes, expected)


def test_tokens_in_prompts_are_codes(four: Talker, device: str) -> None:
    """Ids are those of the first codebook; frames that were said go on as a prompt."""
    ids, text = [3, 17, 52], rows_of(4, seed=1)
    embedded = four.model.model.codec_embedding.weight[ids].detach()
    whole = torch.cat([rows_of(5), embedded])
    wanted = four.says(whole, text)
    with open_engine(four.path, device=device, **SIZES) as engine:
        found = engine.generate(PromptParts(rows_of(5), ids), asked(text))
        assert np.array_equal(found.codes, wanted)
        said = engine.embed_frames(wanted[:4]) + torch.cat([text, PAD[None]])[:4].to(device)
        rest = engine.generate(PromptParts(whole, said), asked(rows_of(0), FRAMES - 4))
        assert np.array_equal(rest.codes, wanted[4:])
        with pytest.raises(ValueError, match=r"codes\[0\]\[1\] is 40: a codebook has 37 codes"):
            engine.embed_frames([[52, 40, 0, 0]])
        with pytest.raises(ValueError, match=r"codes\[0\]\[0\] is 53: a codebook has 53 codes"):
            engine.embed_frames([[53, 0, 0, 0]])


def test_a_picture_in_a_prompt_has_places(four: Talker, device: str) -> None:
    """Positions of the picture's rows, and of all frames after it, are those of transformers."""
    prompt, text, config = rows_of(15), rows_of(4, seed=1), four.model.config
    ids = torch.full((1, 15), 9)
    ids[0, 4], ids[0, 5:11] = config.vision_start_token_id, config.image_token_id
    seen = {"talker_input_ids": ids, "attention_mask": torch.ones_like(ids)}
    # Two by two patches are one row.
    grid = torch.tensor([[1, 4, 6]])
    wanted = frames_of(four.model, prompt, text, PAD, FRAMES, image_grid_thw=grid, **seen).numpy()
    assert not np.array_equal(wanted, four.says(prompt, text))
    parts = PromptParts(prompt[:5], GridEmbeds(prompt[5:11], (1, 2, 3)), prompt[11:])
    for options in ({}, {"prefill_buckets": (8,)}):
        with open_engine(four.path, device=device, **SIZES | options) as engine:
            assert np.array_equal(engine.generate(parts, asked(text)).codes, wanted)


def test_a_reply_ends_with_the_code_of_its_end(four: Talker, device: str, tmp_path: Path) -> None:
    """Its frame is the last one, with END as its first code and its token."""
    prompt, text = rows_of(5), rows_of(3, seed=1)
    before = four.says(prompt, text, 12)
    first = before[:, 0].tolist()
    new = next(i for i in range(3, 12) if first[i] not in first[:i])
    four.model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["codec_head.weight"]
    head[[END, first[new]]] = head[[first[new], END]]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ending = Talker(tmp_path, type(four.model).from_pretrained(tmp_path).eval())
    wanted = ending.says(prompt, text, 12)
    assert len(wanted) == new and np.array_equal(wanted, before[:new])
    params = SamplingParams(temperature=0.0, max_tokens=12, feed=Feed(PAD, text))
    with open_engine(tmp_path, device=device, **SIZES) as engine:
        result = engine.generate(prompt, params)
        assert np.array_equal(result.codes[:-1], wanted)
        assert result.codes[-1][0] == END == result.token_ids[-1]
        assert result.finish_reason == "stop"
        endless = engine.generate(prompt, asked(text, 12))
        assert len(endless.codes) == 12 and endless.finish_reason == "length"


def test_a_checkpoint_of_the_whole_model(four: Talker, device: str, tmp_path: Path) -> None:
    """The thinker, the codec and the projections stay where they are."""
    tensors = {
        f"talker.{name}": t for name, t in load_file(four.path / "model.safetensors").items()
    }
    tensors["thinker.model.layers.0.self_attn.q_proj.weight"] = torch.zeros(2, 2)
    tensors["thinker.lm_head.weight"] = torch.zeros(2)
    tensors["code2wav.decoder.0.conv.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "dtype": "float32",
        "talker_config": json.loads((four.path / "config.json").read_text()),
        "thinker_config": {"text_config": {"hidden_size": 24}},
        "tts_pad_token_id": 7,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert unknown_keys(config) == []
    prompt, text = rows_of(5), rows_of(3, seed=1)
    with open_engine(tmp_path, device=device, **SIZES) as engine:
        found = engine.generate(prompt, asked(text)).codes
    assert np.array_equal(found, four.says(prompt, text))
    silent = config | {"enable_audio_output": False}
    with pytest.raises(ValueError, match="enable_audio_output=False: supported: true"):
        read_model_config(silent)


def test_updated_weights_are_those_of_both_decoders(
    four: Talker, device: str, tmp_path: Path
) -> None:
    prompt, text = rows_of(5), rows_of(3, seed=1)
    other = Talker(tmp_path, write_talker(tmp_path, 4, seed=9))
    with open_engine(four.path, device=device, **SIZES) as engine:
        before = engine.generate(prompt, asked(text)).codes
        engine.update_weights(tmp_path)
        after = engine.generate(prompt, asked(text)).codes
    assert np.array_equal(before, four.says(prompt, text))
    assert np.array_equal(after, other.says(prompt, text))


def _config(four: Talker) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((four.path / "config.json").read_text())
    return found


def test_keys_are_read(four: Talker) -> None:
    config = read_model_config(_config(four))
    inner = config.inner
    assert inner is not None and inner.fed
    assert inner.codebooks == (FIRST_CODES, CODES, CODES, CODES)
    assert (inner.end_code, inner.judged, inner.end_token, len(inner.layers)) == (END, 1, END, 2)
    assert config.rope is not None and config.rope.interleaved
    assert config.rope.sections == (4, 2, 2)
    assert unknown_keys(_config(four)) == []
    talker = {"architectures": ["Qwen3OmniMoeTalkerForConditionalGeneration"]}
    usual = talker | {
        "text_config": {"shared_expert_intermediate_size": 768},
        "codec_eos_token_id": 2150,
    }
    assert read_model_config(usual).inner.codebooks == (3072, *[2048] * 31)
    with pytest.raises(ValueError, match=r"lacks text_config.shared_expert_intermediate_size"):
        read_model_config(usual | {"text_config": {}})
    strange = _config(four)
    strange["code_predictor_config"]["window"] = 3
    assert unknown_keys(strange) == ["code_predictor_config.window"]


@pytest.mark.parametrize(
    ("changes", "of_backbone", "of_predictor", "message"),
    [
        ({"num_code_groups": 1}, {}, {}, r"num_code_groups=1: must be an integer in \[2, 127\]"),
        ({"codec_eos_token_id": 53}, {}, {}, "codec_eos_token_id=53: supported: below the talker"),
        ({}, {"vocab_size": 40_000}, {}, "the talker's vocab_size=40000: supported: at most 32767"),
        ({}, {"num_experts": 5}, {}, "num_local_experts=6: supported: as num_experts is"),
        ({}, {"hidden_act": "gelu"}, {}, "hidden_act='gelu'"),
        ({}, {}, {"num_code_groups": 5}, "code_predictor_config.num_code_groups=5: supported: 4"),
        ({}, {}, {"hidden_size": 36}, "code_predictor_config.hidden_size=36: supported: 72"),
        ({}, {}, {"vocab_size": 2**15}, "code_predictor_config.vocab_size=32768"),
        ({}, {}, {"max_position_embeddings": 3}, "max_position_embeddings=3: supported: num_code"),
    ],
)
def test_configs_that_are_refused(
    four: Talker,
    changes: dict[str, Any],
    of_backbone: dict[str, Any],
    of_predictor: dict[str, Any],
    message: str,
) -> None:
    config = _config(four) | changes
    config["text_config"] |= of_backbone
    config["code_predictor_config"] |= of_predictor
    with pytest.raises(ValueError, match=message):
        read_model_config(config)


def test_feeds_are_checked(four: Talker) -> None:
    for given, message in (
        ((rows_of(2),), r"pad of shape \[2, 72\] must be one row"),
        ((PAD, rows_of(3)[:, :70]), "rows of 70 values and a pad of 72 must have as many"),
        ((PAD > 0,), r"pad of shape \[1, 72\] and torch.bool must be of floating point"),
        ((PAD.int(), rows_of(3)), "rows of torch.float32 and a pad of torch.int64 must both be em"),
        (([0.0],), r"feed: pad=\[0.0\] must be a tensor or an array, \[n, H\]"),
        ((PAD, rows_of(3).to_sparse()), "must be dense, with values"),
    ):
        with pytest.raises(ValueError, match=message):
            Feed(*given)
    assert Feed(PAD) == Feed(PAD.clone()) != Feed(PAD, rows_of(1))
    assert repr(Feed(PAD, rows_of(3))) == "Feed(pad=tensor[72], rows=tensor[3, 72])"
    with open_engine(four.path, device="cpu", **SIZES) as engine:
        for params, message in (
            (SamplingParams(), r"feed=None: this model adds an embedding of 72 values to each fr"),
            (
                SamplingParams(feed=Feed(PAD[:70])),
                r"pad of shape \[1, 70\]: the model takes \[n, 72",
            ),
            (
                SamplingParams(feed=Feed(PAD.int())),
                r"pad of shape \[1, 72\]: the model takes \[n, 72\], not torch.int64",
            ),
            (asked(rows_of(3) / 0), r"rows of shape \[3, 72\]: row 0 is not finite in torch.float"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.submit(rows_of(3), params)
        assert not engine.busy
    with (
        open_engine(device="cpu") as engine,
        pytest.raises(ValueError, match=r"feed=Feed\(.*\) is for models that add an embedding to"),
    ):
        engine.submit("x", SamplingParams(feed=Feed(PAD)))


def test_the_loop_by_hand_is_that_of_transformers(four: Talker) -> None:
    given = four.model, rows_of(5), rows_of(3, seed=1), PAD, FRAMES
    assert torch.equal(frames_by_hand(*given), frames_of(*given))


@pytest.mark.parametrize("width", [40, HIDDEN])
def test_a_code_predictor_with_a_width_of_its_own(device: str, tmp_path: Path, width: int) -> None:
    """A talker of Qwen3-TTS's shape: dense, and a linear with a bias between the two decoders."""
    model = write_tts(tmp_path, 5, width)
    prompts, texts = [rows_of(11), rows_of(1)], [rows_of(3, seed=1), rows_of(9, seed=1)]
    wanted = [
        frames_by_hand(model, *each, PAD, FRAMES) for each in zip(prompts, texts, strict=True)
    ]
    options = SIZES | {"prefill_buckets": (8,)}
    with open_engine(tmp_path, device=device, **options) as engine:
        assert engine.model.config.inner.hidden_size == width
        results = engine.generate(prompts, [asked(text) for text in texts])
        for result, expected in zip(results, wanted, strict=True):
            assert np.array_equal(result.codes, expected.numpy())


_AXES = {"mrope_section": [24, 20, 20], "interleaved": True, "rope_type": "default"}
_TALL: dict[str, Any] = {
    "num_attention_heads": 16, "head_dim": 128, "vocab_size": 3072, "rope_theta": 1_000_000,
    "rope_scaling": _AXES, "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
_OMNI: dict[str, Any] = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "talker_config": {
        "num_code_groups": 16, "codec_eos_token_id": 2150, "seconds_per_chunk": 2,
        "text_config": _TALL | {
            "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 20,
            "num_key_value_heads": 2, "num_experts": 128, "num_experts_per_tok": 6,
            "moe_intermediate_size": 384, "shared_expert_intermediate_size": 768,
            "norm_topk_prob": True, "max_position_embeddings": 65_536,
        },
        "code_predictor_config": {"num_code_groups": 16, "rope_theta": 1_000_000},
    },
}  # fmt: skip
_TTS: dict[str, Any] = {
    "architectures": ["Qwen3TTSForConditionalGeneration"],
    "talker_config": _TALL | {
        "num_code_groups": 16, "codec_eos_token_id": 2150, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "code_predictor_config": {"num_code_groups": 16, "rope_theta": 1_000_000},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "layers", "width", "millions"), [(_OMNI, 20, 1024, 3312), (_TTS, 28, 2048, 1597)]
)
def test_published_shapes(config: dict[str, Any], layers: int, width: int, millions: int) -> None:
    """What is read of them: both decoders, the embeddings of codes, and the heads."""
    model = read_model_config(config)
    inner = model.inner
    assert inner is not None and unknown_keys(config) == []
    assert (model.num_layers, inner.steps, len(inner.layers)) == (layers, 16, 5)
    assert (inner.width, inner.hidden_size, inner.projection_bias) == (width, 1024, width != 1024)
    weights = model.allocate(device="meta", dtype=torch.bfloat16)
    assert weights.parameters // 10**6 == millions
