"""Vanilla MTP against transformers' `MtpModel`, which chains its modules: drafts and caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from engines.small_engine import greedy
from engines.speculation import ENDLESS, open_speculating
from graphengine import Engine, Request
from graphengine.speculative import MTP

pytestmark = pytest.mark.skipif(
    not hasattr(MtpModel, "forward_layer"),
    reason="this version of transformers cannot run one module by itself",
)

VOCAB, HIDDEN, LAYERS = 97, 72, 2
BLOCK = 8
TOLERANCE = 1e-4


class Oracle:
    """A random dense model, its modules, and the checkpoint of both in DeepSeek-V3's layout.

    The next token follows mostly from the last one, for the modules too: so drafts are accepted now
    and then, and rejected. The rest of what decides is the hidden state that a module reads.
    """

    def __init__(self, folder: Path, kind: str, modules: int) -> None:
        sizes: dict[str, Any] = {
            "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 56,
            "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 64, "max_position_embeddings": 256, "tie_word_embeddings": False,
            "num_mtp_layers": modules, "eos_token_id": 0, "initializer_range": 0.15,
        }  # fmt: skip
        torch.manual_seed(modules)
        self.target: Any
        if kind == "llama":
            self.target = LlamaForCausalLM(LlamaConfig(**sizes))
        else:
            mtp = {"mtp_layer_types": ["full_attention"] * modules}
            self.target = Qwen3ForCausalLM(Qwen3Config(**sizes, **mtp))
        self.target = self.target.float().eval()
        self.mtp: Any = MtpModel(self.target, modules).float().eval()
        self._draw()
        self.path = folder
        self.target.save_pretrained(folder)
        file = folder / "config.json"
        config = json.loads(file.read_text()) | {"num_nextn_predict_layers": modules}
        file.write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors") | self._tensors()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def _draw(self) -> None:
        generator = torch.Generator().manual_seed(1)
        everything = [*self.target.named_parameters(), *self.mtp.layers.named_parameters()]
        with torch.no_grad():
            for name, weight in everything:
                noise = torch.randn(weight.shape, generator=generator)
                if "norm" in name:
                    weight.copy_(1 + 0.06 * noise)
                elif name.endswith("eh_proj.weight"):
                    token = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
                    weight.copy_(token + 0.04 * noise)
                elif name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.copy_(0.01 * noise)
                else:
                    weight.copy_(noise * (0.9 if "embed_tokens" in name else 0.15))

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The modules', by their names in the layout."""
        own = {"post_norm.weight": "shared_head.norm.weight"}
        named = {}
        for name, tensor in self.mtp.layers.state_dict().items():
            index, rest = name.split(".", 1)
            rest = own.get(rest, rest.removeprefix("mtp_block."))
            named[f"model.layers.{LAYERS + int(index)}.{rest}"] = tensor.contiguous()
        return named

    @torch.no_grad()
    def check(self, sequence: list[int], drafts: list[int]) -> list[torch.Tensor]:
        """Each draft after `sequence` must be the best token of its module, or as good as that;
        the values [G, T, D] of every module's cache.

        All rows anew, so what is true by now is what is seen.
        """
        hidden = self.target.model(torch.tensor([sequence[:-1]])).last_hidden_state
        ids = torch.tensor([sequence[1:]])
        position = torch.arange(1, len(sequence))[None]
        cache = MtpCache(config=self.target.config.get_mtp_config())
        for index, draft in enumerate(drafts):
            hidden = self.mtp.forward_layer(index, hidden, position, cache, input_ids=ids)
            logits = self.mtp._project_to_logits(hidden[:, -1])[0]
            near = TOLERANCE * float(logits.abs().max())
            assert float(logits[draft]) >= float(logits.max()) - near, f"{index=} {drafts=}"
            ids = torch.cat([ids[:, 1:], torch.tensor([[draft]])], dim=1)
            position = position + 1
        return [layer.values[0] for layer in cache.layers[: len(drafts)]]


def values_of(engine: Engine, request: Request, module: int, length: int) -> torch.Tensor:
    """[G, T, D] of a module's cache. Keys are not compared: transformers turns those of module m by
    m positions more, its queries too.
    """
    kv, table = (
        engine.runtime.caches[1][0][module],
        engine.runtime.buffers["block_table"][request.job.placed.slot],
    )
    position = torch.arange(length)
    return kv[table[position // BLOCK].long(), 1, position % BLOCK].transpose(0, 1)


def follow(engine: Engine, oracle: Oracle, request: Request, k: int) -> set[int]:
    """Step to the request's end; after each step its drafts and caches are the oracle's.

    Returns how many tokens steps had.
    """
    counts = set()
    while not request.finished:
        before = len(request.token_ids)
        engine.step()
        count = len(request.token_ids) - before
        if request.finished or not count:
            continue
        sequence = [*request.prompt_token_ids, *request.token_ids]
        drafts = engine.runtime.buffers["draft_tokens"][request.job.placed.slot].tolist()
        for module, expected in enumerate(oracle.check(sequence, drafts)):
            found = values_of(engine, request, module, len(sequence) - 1)
            error = (found - expected).abs().amax(dim=(0, 2)) / expected.abs().max()
            assert error.max() <= TOLERANCE, f"{module=} {len(sequence)=} {error=}"
        counts.add(count)
    return counts


@pytest.mark.parametrize(
    ("kind", "k"), [("llama", 1), ("llama", 2), ("llama", 3), ("qwen3", 2), ("qwen3", 3)]
)
def test_drafts_and_caches_are_those_of_transformers(tmp_path: Path, kind: str, k: int) -> None:
    """Prompts of one token, of several chunks, and with a prefix that is there already; steps that
    accept nothing, and steps that accept everything.
    """
    oracle = Oracle(tmp_path, kind, k)
    prompt = torch.randint(VOCAB, (4 * BLOCK,), generator=torch.Generator().manual_seed(k))
    tokens: list[int] = prompt.tolist()
    options: dict[str, Any] = {"max_batch": 2, "max_seq_len": 96, "block_size": BLOCK,
                               "prefill_buckets": (4, 16), "lookahead": 0, "device": "cpu",
                               "dtype": "float32", "prefix_caching": True}  # fmt: skip
    counts = set()
    with open_speculating(MTP(k, style="vanilla"), oracle.path, **options) as engine:
        for asked in (tokens[:1], tokens[:29], [*tokens[:27], 3, 4]):
            request = engine.submit(asked, greedy(16, **ENDLESS))
            counts |= follow(engine, oracle, request, k)
        assert request.cached_tokens == 3 * BLOCK
    assert {1, k + 1} <= counts, f"{counts}"
