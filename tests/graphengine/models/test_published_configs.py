"""Configs of published checkpoints: read or refused at their true sizes, and run at small ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.published import PUBLISHED, shrunk
from engines.small_engine import greedy, open_engine
from extent import extent
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import HfConfig, unknown_keys
from graphengine.models.quantised.config import read_quantisation

ROOT = Path(__file__).resolve().parents[3]
UNKNOWN = [
    "BaichuanForCausalLM",
    "DeepseekForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "InternLM2ForCausalLM",
    "Llama4ForConditionalGeneration",
    "MiMoV2FlashForCausalLM",
    "MiniCPMForCausalLM",
    "MiniMaxM3ForCausalLM",
    "QWenLMHeadModel",
    "Step3p7FlashForCausalLM",
]
"""Architectures that the engine does not know."""
REFUSED = {
    "LFM2.5-8B-A1B in MLX, 8 bits": "quantization={'group_size': 64, 'bits': 8, 'mode': 'affine'}",
}
"""Checkpoints of known architectures that are refused, with what the error says."""


def _error(config: HfConfig, quant_file: HfConfig | None = None) -> str | None:
    """What is wrong with the configs; None: they are read."""
    try:
        read_model_config(config)
        read_quantisation(config, quant_file)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", PUBLISHED)
def test_true_sizes_are_read_or_refused_as_expected(name: str) -> None:
    _, config, quant_file = PUBLISHED[name]
    error = _error(config, quant_file)
    architecture = config["architectures"][0]
    if architecture in UNKNOWN:
        expected: str | None = f"unknown architecture {architecture!r}"
    else:
        expected = REFUSED.get(name)
    assert (error is None) == (expected is None), error
    assert expected is None or expected in str(error)
    assert error is not None or unknown_keys(config) == []


ACCEPTED = [
    name
    for name, found in PUBLISHED.items()
    if name not in REFUSED and found.config["architectures"][0] not in UNKNOWN
]


def test_what_works_names_the_checkpoints_that_are_accepted() -> None:
    page = (ROOT / "docs" / "supported.md").read_text()
    table = page.partition("## What was run")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert sorted(re.findall("`(.+?)`", "\n".join(rows))) == sorted(map(_short, ACCEPTED))


def test_what_works_names_the_architectures_that_are_not_known() -> None:
    page = (ROOT / "docs" / "supported.md").read_text()
    models = page.partition("## Models")[2].partition("\n## ")[0]
    listed = re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| `.*", models, re.MULTILINE)))
    assert sorted(listed) == sorted(UNKNOWN)


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _run() -> list[str]:
    """Accepted checkpoints, one of each model type; in a long run all of them.

    Of those that are alike once they are shrunk, one is enough.
    """
    types: dict[Any, str] = {}
    configs: dict[str, str] = {}
    for name in ACCEPTED:
        config = shrunk(PUBLISHED[name].config)
        types.setdefault(
            (config["model_type"], config.get("text_config", {}).get("model_type")), name
        )
        configs.setdefault(json.dumps(config, sort_keys=True), name)
    return [*extent(types, configs).values()]


@pytest.mark.parametrize("name", _run())
def test_shrunk_configs_say_what_transformers_does(name: str, tmp_path: Path, device: str) -> None:
    model = _saved(shrunk(PUBLISHED[name].config), tmp_path)
    prompt = torch.randint(131, (21,), generator=torch.Generator().manual_seed(3)).tolist()
    with open_engine(tmp_path, device=device, dtype="float32", max_seq_len=64) as engine:
        said = engine.generate(prompt, greedy(8, ignore_eos=True)).token_ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *said]])).logits[0]
    assert said == tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist())


_KIMI_TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "pos_emb_height": 4, "pos_emb_width": 4,
}  # fmt: skip


def _saved(config: dict[str, Any], folder: Path) -> Any:
    """transformers' model of this config, with random weights, saved with the config as it is."""
    import transformers

    # MiMo, which transformers lacks, is Qwen2 with draft modules.
    names = {"MiMoForCausalLM": "Qwen2ForCausalLM"}
    names["KimiK25ForConditionalGeneration"] = "Kimi_K25ForConditionalGeneration"
    architecture = config["architectures"][0]
    kind = getattr(transformers, names.get(architecture, architecture))
    torch.manual_seed(7)
    known = kind.config_class
    told = config | {"model_type": known.model_type}
    if {"rotary_dim", "head_dim"} <= config.keys():  # which transformers before 5.18 does not read
        told["partial_rotary_factor"] = config["rotary_dim"] / config["head_dim"]
    if architecture == "KimiK25ForConditionalGeneration":
        # Sizes of the tower by the names that transformers has for them.
        told |= {"vision_config": _KIMI_TOWER, "projection_hidden_size": 32}
    model = kind(known.from_dict(told)).eval().float()
    for weight in model.parameters():
        with torch.no_grad():
            weight.copy_(weight + 0.2 * torch.randn_like(weight))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return model
