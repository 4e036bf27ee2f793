"""Adapters that peft itself saves, against peft's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

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
    config = peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.3, **options)
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    model.eval()
    given: dict[str, Any] = {"adapters": {"a": tmp_path / "adapter"}}
    if merge:
        given = {"merge_adapter": tmp_path / "adapter"}
    sizes = {
        "max_batch": 2,
        "max_seq_len": extent(128, 384),
        "block_size": 8,
        "prefill_buckets": (16, 64),
    }
    params = SamplingParams(temperature=0.0, max_tokens=extent(16, 64), ignore_eos=True)
    with Engine.from_pretrained(
        base.path, device="cpu", dtype="float32", **sizes, **given
    ) as engine:
        for prompt in base.prompts(extent((1, 17, 75), (1, 17, 90, 300))):
            result = engine.generate(prompt, params, adapter=None if merge else "a")
            sequence = torch.tensor([[*prompt, *result.token_ids]])
            with torch.no_grad():
                logits = model(sequence).logits[0, len(prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
            assert ((logits.amax(1) - chosen) / logits.abs().amax(1)).max() <= 2e-4
