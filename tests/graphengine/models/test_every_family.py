"""Every architecture of the registry on random checkpoints: whatever an engine does with prompts,
its greedy tokens are those of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.adapters import linears_of, merged, write_adapter
from checkpoints.family_models import MODELS
from engines.family_replies import (
    Family,
    assert_drafted,
    assert_packed,
    assert_paused,
    assert_session,
    assert_whole_and_in_chunks,
    prompts_of,
    run_all,
    small_pool,
)
from engines.pictures import Pictures
from extent import extent, some_of
from graphengine import NGram, PromptParts
from graphengine.models.checkpoints.checkpoint import Checkpoint, whole_names
from graphengine.models.checkpoints.destinations import read_model
from graphengine.models.families.registry import FAMILIES

TOKENS = extent(24, 64)
LENGTHS = extent((1, 17, 90), (1, 17, 90, 300))
MODELS_OF_EACH = [(name, index) for name, models in MODELS.items() for index in range(len(models))]
CASES = [(name, index, seed) for name, index in MODELS_OF_EACH for seed in range(2)]
SEEING = [name for name in MODELS if name.endswith("ForConditionalGeneration")]
ALONE = [case for case in CASES if case[0] not in SEEING]
"""Models of architectures without a tower."""
OF_FRAMES = {
    "CsmForConditionalGeneration",
    "HiggsAudioV2ForConditionalGeneration",
    "MoshiForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3OmniMoeTalkerForConditionalGeneration",
    "Qwen3TTSForConditionalGeneration",
}
"""Architectures whose steps emit frames, which have no tokens; `test_csm.py`,
`test_higgs_audio.py`, `test_moshi.py` and `test_talker.py` have their frames."""
WITHOUT_ADAPTERS = {("DeepseekV2ForCausalLM", 1)}
"""Models none of whose linears adapters can change."""


def allowed_ids(architecture: str) -> int | None:
    """Beside a tower, ids from 250 on are places of pictures."""
    return 250 if architecture in SEEING else None


@pytest.fixture(scope="module")
def accepted() -> Iterator[list[int]]:
    """Drafts that were accepted, of each case; where no token repeats, a case may have none."""
    found: list[int] = []
    yield found
    assert sum(found) > 0


def test_every_architecture_has_a_model() -> None:
    assert MODELS.keys() == FAMILIES.keys() - OF_FRAMES


@pytest.mark.parametrize(("architecture", "index", "seed"), some_of(CASES, 0))
def test_tokens_are_those_of_transformers(
    architecture: str, index: int, seed: int, tmp_path: Path, accepted: list[int]
) -> None:
    """Prompts whole, in chunks, paused, with drafts, packed, and in a session."""
    path = tmp_path / f"{architecture}-{index}-{seed}"
    model = MODELS[architecture][index].write(path, seed)
    family = Family(model, path, seed, allowed=allowed_ids(architecture))
    prompts = prompts_of(250, LENGTHS, seed)
    longest = LENGTHS[-1]
    assert_whole_and_in_chunks(family, prompts, TOKENS, longest)
    assert_paused(family, prompts[::-1], LENGTHS[::-1], TOKENS)
    assert_drafted(family, prompts, TOKENS)
    if family.allowed is None:
        # Where ids are restricted each prompt has a replay of its own.
        assert_packed(family, prompts, TOKENS)
    assert_session(family, (prompts[2], prompts[1], prompts[0]), 60, TOKENS)
    assert_session(
        family, (prompts[1], prompts[0], prompts[2]), 14, TOKENS, window_rings=False, **family.rows
    )
    print(family.seen)
    family.seen.assert_varied()
    accepted.append(family.seen.accepted)


@pytest.mark.parametrize(
    ("architecture", "seed"), some_of([(name, seed) for name in SEEING for seed in range(2)], 6)
)
def test_tokens_after_pictures_are_those_of_transformers(
    architecture: str, seed: int, tmp_path: Path, accepted: list[int]
) -> None:
    """Two pictures in a prompt, one, and none; the second one in a session's later turn, too."""
    path = tmp_path / f"{architecture}-pictures-{seed}"
    model = MODELS[architecture][0].write(path, seed)
    pictures = Pictures(model, seed)
    family = Family(model, path, seed, {"prompt_embeds": True}, pictures.logits, 250)
    one, other = pictures.parts
    long, short, tail = prompts_of(250, (90, 17, 5), seed)
    prompts = [
        PromptParts(tail, one, short, other, long),
        PromptParts(one, long),
        PromptParts(short, one, tail),
        short,
    ]
    longest = sum(pictures.places) + 112
    assert_whole_and_in_chunks(family, prompts, TOKENS, longest)
    lengths = (longest, pictures.places[0] + 90, pictures.places[0] + 22, 17)
    assert_paused(family, prompts, lengths, TOKENS)
    assert_drafted(family, prompts, TOKENS)
    turns = (PromptParts(tail, one, long), PromptParts(short, other, tail), tail)
    kept = 5 + pictures.places[0] + 31
    assert_session(family, turns, kept, TOKENS)
    assert_session(family, turns, kept, TOKENS, window_rings=False, speculative=NGram(k=2))
    print(family.seen)
    family.seen.assert_varied()
    accepted.append(family.seen.accepted)


def _adaptable(path: Path, model: Any) -> set[str]:
    """Linears that adapters can change, of those that peft would."""
    weights = read_model(Checkpoint.open(path)).allocate(device="meta", dtype=torch.float32)
    names = {name for linear in weights.adaptable() for name, _ in linear.parts}
    return {
        name
        for name in linears_of(model)
        if {each.removesuffix(".") for each in whole_names(path, [f"{name}."])} <= names
    }


@pytest.mark.parametrize(("architecture", "index", "seed"), some_of(ALONE, 0))
def test_tokens_with_adapters_are_those_of_merged_weights(
    architecture: str, index: int, seed: int, tmp_path: Path
) -> None:
    """Two adapters and none side by side: in chunks, paused, drafted, and in a session."""
    path = tmp_path / f"{architecture}-{index}-{seed}"
    model = MODELS[architecture][index].write(path, seed)
    targets = _adaptable(path, model)
    assert bool(targets) == ((architecture, index) not in WITHOUT_ADAPTERS)
    if not targets:
        return
    folders, models = {}, {None: model}
    for name, rank in (("one", 3), ("two", 8)):
        folders[name] = write_adapter(tmp_path / name, model, targets, rank=rank, seed=rank + seed)
        models[name] = merged(model, folders[name])
    families = {
        name: Family(each, path, seed, {"adapters": folders}) for name, each in models.items()
    }
    prompts = prompts_of(250, LENGTHS, seed)[::-1]
    asked = ["one", None, "two", "one"][: len(prompts)]
    base = families[None]
    pool = small_pool(base, LENGTHS, TOKENS)
    for options in ({"prefill_buckets": (8, 32)}, pool, {"speculative": NGram(k=3)}):
        with base.open(**options) as engine:
            requests = [
                engine.submit(prompt, base.greedy(TOKENS), adapter=name)
                for prompt, name in zip(prompts, asked, strict=True)
            ]
            run_all(engine)
            for request in requests:
                families[request.adapter].check([request.result()])
            assert engine.counters["pauses"] > 0 or options is not pool
            with engine.session(adapter="two") as session:
                for part in prompts[-2:]:
                    session.append(part)
                    families["two"].check([session.generate(base.greedy(20))])
    assert len({*families["one"].seen.tokens} ^ base.seen.tokens) > 4


@pytest.mark.parametrize(("architecture", "index"), some_of(MODELS_OF_EACH, 0))
def test_tokens_are_those_of_the_weights_whose_version_they_have(
    architecture: str, index: int, tmp_path: Path
) -> None:
    """Other weights from a folder, and the first ones again from tensors; a session goes on."""
    families = []
    for seed in range(2):
        path = tmp_path / f"{architecture}-{index}-{seed}"
        model = MODELS[architecture][index].write(path, seed)
        families.append(Family(model, path, 0, allowed=allowed_ids(architecture)))
    prompts = prompts_of(250, LENGTHS[:3], 0)
    first, other = families
    stored = {
        name: tensor
        for file in sorted(first.path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    with first.open(speculative=NGram(k=2), prefill_buckets=(16, 64)) as engine:
        session = engine.session()
        session.append(prompts[1])
        for family, version, source in [
            (first, 0, None),
            (other, 7, other.path),
            (first, 8, stored),
        ]:
            if source is not None:
                engine.update_weights(source, version=version)
            results = engine.generate(prompts, family.greedy(TOKENS))
            results.append(session.generate(family.greedy(20)))
            family.check(results)
            assert {result.weight_version for result in results} == {version}
            session.append(prompts[0])
        session.close()
    assert first.seen.tokens != other.seen.tokens
