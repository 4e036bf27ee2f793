"""Adapters that peft itself saves, against peft's own model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.family_models import MODELS
from checkpoints.tower_models import GRIDS, TOWERS
from extent import extent
from graphengine import Engine, SamplingParams

peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

OPTIONS: list[dict[str, Any]] = [
    {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"},
    {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["o_proj", "up_proj", "down_proj"],
        "rank_pattern": {"down_proj": 7},
        "alpha_pattern": {"mlp.up_proj": 20},
        "layers_to_transform": [1],
    },
]


@pytest.mark.parametrize("options", OPTIONS, ids=["all", "rslora", "patterns"])
@pytest.mark.parametrize("merge", [False, True])
def test_tokens_are_those_of_peft(
    checkpoints: dict[str, Any], tmp_path: Path, options: dict[str, Any], merge: bool
) -> None:
    """lm_head is left out by peft's "all-linear", and dropout plays no part."""
    from transformers import AutoModelForCausalLM

    base = checkpoints["qwen3-biases"]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float32)
    prompts = base.prompts(extent((1, 17, 75), (1, 17, 90, 300)))
    model = adapted(model, tmp_path / "adapter", lora_dropout=0.3, **options)
    assert_tokens(model, base.path, tmp_path / "adapter", prompts, merge=merge)


@pytest.mark.parametrize(
    ("make", "linear"),
    [
        (MODELS["GPT2LMHeadModel"][0].make, "attn.c_attn"),
        (MODELS["GPTJForCausalLM"][0].make, "attn.q_proj"),
        (GRIDS["qwen2_vl"], "self_attn.q_proj"),
        (TOWERS["llava"], "self_attn.q_proj"),
    ],
    ids=["gpt2", "gptj", "qwen2_vl", "llava"],
)
def test_patterns_with_full_names(tmp_path: Path, make: Callable[[], Any], linear: str) -> None:
    """Names that checkpoints with a vision tower and those of GPT have, which differ from ours."""
    torch.manual_seed(3)
    model = make()
    model.save_pretrained(tmp_path / "base")
    names = [name for name, _ in model.named_modules() if name.endswith(linear)]
    one, other = [name for name in names if "vision" not in name and "visual" not in name][:2]
    model = adapted(
        model, tmp_path / "adapter", r=4, lora_alpha=8, target_modules=[one, other],
        rank_pattern={one: 6}, alpha_pattern={f"^{other}": 64},
    )  # fmt: skip
    prompts = [torch.randint(3, 240, (count,)).tolist() for count in (1, 17)]
    for merge in (False, True):
        assert_tokens(model, tmp_path / "base", tmp_path / "adapter", prompts, merge=merge)


def adapted(model: Any, folder: Path, **options: Any) -> Any:
    """The model with a random adapter, which is saved to the folder."""
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return model.eval()


def assert_tokens(
    model: Any, base: Path, folder: Path, prompts: Sequence[Sequence[int]], *, merge: bool
) -> None:
    """The engine's tokens are the likeliest of peft's model, up to rounding."""
    given: dict[str, Any] = {"merge_adapter": folder} if merge else {"adapters": {"a": folder}}
    sizes = {
        "max_batch": 2,
        "max_seq_len": extent(128, 384),
        "block_size": 8,
        "prefill_buckets": (16, 64),
    }
    params = SamplingParams(temperature=0.0, max_tokens=extent(16, 64), ignore_eos=True)
    with Engine.from_pretrained(base, device="cpu", dtype="float32", **sizes, **given) as engine:
        for prompt in prompts:
            result = engine.generate(prompt, params, adapter=None if merge else "a")
            sequence = torch.tensor([[*prompt, *result.token_ids]])
            with torch.no_grad():
                logits = model(sequence).logits[0, len(prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
            assert ((logits.amax(1) - chosen) / logits.abs().amax(1)).max() <= 2e-4
