"""A family that exists for the tests alone: a layer that attends, one that recurs, one without
state. It is written as any family is, with the contract and the blocks, and opens once it is in
`models/families/registry.py`'s table.

    layer 0   x += attention(norm(x))                                   keys and values
    layer 1   s = sigmoid(decay) * s + W_in norm(x);  x += W_out s      s, for each slot
    layer 2   x += swiglu(norm(x))                                      nothing

Letters: N lanes, T tokens of a chunk, S slots, H hidden, D width of the recurrent state.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from graphengine.kernels.linear.call import AnyWeight, LinearCall
from graphengine.kernels.linear.epilogues import LOGITS, STORE
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.plans import RowFamily
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.embedding import embed
from graphengine.kernels.norm_rope.norm import rms_norm
from graphengine.kernels.norm_rope.rope_config import RopeConfig
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from graphengine.models.blocks.gqa import AttentionWeights, GroupedQueryAttention
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.blocks.streams import (
    PrefillScratch,
    add_chunk_product,
    add_product,
    chunk_product,
    kept_rows,
)
from graphengine.models.blocks.swiglu import Swiglu, SwigluWeights
from graphengine.models.contract import (
    LayerSpan,
    ModelWeights,
    PrefillEnd,
    Shaped,
)
from graphengine.models.hf.config_schema import HfConfig, read_key
from graphengine.models.launches import (
    ONE_RANK,
    ChunkAttention,
    DecodeLaunch,
    PrefillLaunch,
)
from graphengine.models.linears import PLAIN, Linear, Linears, WeightForms, names_of_linears
from graphengine.models.states import LayerStates, Recurrent, StateTensors
from graphengine.models.weights import StoredLinear, Weight

ARCHITECTURE = "ToyForCausalLM"
RECURRENT = (1, "mix")
"""Layer and name of its recurrent state."""
CONFIG = {
    "architectures": [ARCHITECTURE],
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}
HEAD_DIM, WIDTH, EPS, THETA = 64, 24, 1e-5, 1e4


def read_config(config: HfConfig, architecture: str) -> ToyConfig:
    """What `FAMILIES` has for the architecture."""
    return ToyConfig(
        architecture=architecture,
        vocab_size=read_key(config, "vocab_size"),
        hidden_size=read_key(config, "hidden_size"),
        ffn_size=read_key(config, "intermediate_size"),
        num_heads=read_key(config, "num_attention_heads"),
        num_kv_heads=read_key(config, "num_key_value_heads"),
        max_positions=read_key(config, "max_position_embeddings"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    max_positions: int
    norm_eps: float = EPS
    num_layers: int = 3
    tie_embeddings: bool = False
    logits_cap: float = 0.0

    @property
    def attention(self) -> GroupedQueryAttention:
        return GroupedQueryAttention(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=HEAD_DIM,
            norm_eps=self.norm_eps,
        )

    @property
    def mlp(self) -> Swiglu:
        return Swiglu(hidden_size=self.hidden_size, ffn_size=self.ffn_size, norm_eps=self.norm_eps)

    @property
    def max_prompt(self) -> int:
        return self.max_positions

    @property
    def deepstack(self) -> int:
        return 0

    @property
    def bidirectional_images(self) -> bool:
        return False

    @property
    def inner(self) -> None:
        return None

    @property
    def rope_axes(self) -> None:
        """Positions have one axis."""

    @property
    def embedding_name(self) -> str:
        return "model.embed_tokens"

    def untied(self) -> ToyConfig:
        return replace(self, tie_embeddings=False)

    @property
    def forms(self) -> WeightForms:
        return PLAIN

    def stored_as(self, forms: WeightForms) -> ToyConfig:
        raise ValueError(f"a {self.architecture} has no packed weights, {len(forms)} are asked for")

    def named_as(self, tensors: Mapping[str, Shaped]) -> ToyConfig:
        return self

    def parted(self, beginning: Collection[str]) -> ToyConfig:
        return self

    def with_state_dtype(self, dtype: torch.dtype) -> ToyConfig:
        return self

    def stage(self, span: LayerSpan) -> ToyConfig:
        raise ValueError(f"a {self.architecture} is not cut into stages, as {span} asks for")

    @property
    def linears(self) -> Linears:
        return {
            **self.attention.linears,
            "mix_in": Linear("store", WIDTH, self.hidden_size, shard="rows"),
            "mix_out": Linear("residual", self.hidden_size, WIDTH, shard="columns"),
            **self.mlp.linears,
            "lm_head": Linear("sample", self.vocab_size, self.hidden_size),
        }

    @property
    def states(self) -> tuple[LayerStates, ...]:
        return ((self.attention.state,), (Recurrent(RECURRENT[1], (WIDTH,)),), ())

    def split_tokens(self, family: RowFamily, dtype: torch.dtype, tokens: int) -> int:
        return self.attention.split_tokens(family, dtype, tokens)

    def table_bytes(self, max_seq_len: int) -> int:
        return RopeTables.nbytes(HEAD_DIM, max_seq_len)

    def attention_bytes(self, rows: int, max_seq_len: int) -> int:
        return self.attention.workspace_bytes(rows, max_seq_len)

    @property
    def prefill_width(self) -> int:
        widths = [self.attention.prefill_width, WIDTH + self.hidden_size]
        return max(*widths, self.mlp.prefill_width)

    def scan_bytes(self, lanes: int, prompts: int | None = None) -> int:
        return 0

    def allocate(self, *, device: str, dtype: torch.dtype) -> ToyWeights:
        def new(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        hidden = self.hidden_size
        return ToyWeights(
            config=self,
            embedding=new(self.vocab_size, hidden),
            lm_head=new(self.vocab_size, hidden),
            norms=tuple(new(hidden) for _ in range(self.num_layers + 1)),
            attention=self.attention.allocate(
                "model.layers.0.self_attn.", PLAIN, device=device, dtype=dtype
            ),
            mix_in=new(WIDTH, hidden),
            mix_out=new(hidden, WIDTH),
            decay=new(WIDTH),
            mlp=self.mlp.allocate("model.layers.2.mlp.", PLAIN, device=device, dtype=dtype),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyWeights(ModelWeights):
    """`norms[i]` is before layer i, the last one after all of them."""

    config: ToyConfig
    norms: tuple[Tensor, ...]
    attention: AttentionWeights
    mix_in: Tensor
    mix_out: Tensor
    decay: Tensor
    mlp: SwigluWeights

    def linears(self) -> list[StoredLinear]:
        return self.attention.linears() + self.mlp.linears()

    def linear_names(self) -> Mapping[str, str]:
        return names_of_linears([self.attention, self.mlp])

    def stored(self) -> dict[str, Weight]:
        *before, after = self.norms
        return {
            "model.embed_tokens.weight": Weight(self.embedding),
            "lm_head.weight": Weight(self.lm_head),
            "model.norm.weight": Weight(after),
            **{f"model.layers.{index}.norm.weight": Weight(n) for index, n in enumerate(before)},
            **self.attention.stored(),
            "model.layers.1.mix.in.weight": Weight(self.mix_in, 0),
            "model.layers.1.mix.out.weight": Weight(self.mix_out, 1),
            "model.layers.1.mix.decay": Weight(self.decay, 0),
            **self.mlp.stored(),
        }

    def tensors(self) -> list[Tensor]:
        own = [self.embedding, self.lm_head, *self.norms, self.mix_in, self.mix_out, self.decay]
        return own + self.attention.tensors() + self.mlp.tensors()

    def kv_scales(self) -> dict[str, Tensor]:
        return {"model.layers.0.self_attn.": self.attention.kv_scales}

    def open(self, *, max_seq_len: int, vocabulary: int = 0) -> ToyModel:
        return ToyModel(self, max_seq_len=max_seq_len, vocabulary=vocabulary)


class ToyModel:
    head_bias: Tensor | None = None

    def __init__(self, weights: ToyWeights, *, max_seq_len: int, vocabulary: int) -> None:
        self.config = weights.config
        self.weights = weights
        self.lm_head = weights.lm_head[: vocabulary or None]
        self.tables = RopeTables.of(
            RopeConfig(theta=THETA),
            head_dim=HEAD_DIM,
            max_seq_len=max_seq_len,
            device=weights.embedding.device,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    @property
    def max_seq_len(self) -> int:
        return self.tables.max_seq_len

    @property
    def first_norm(self) -> Tensor:
        return self.weights.norms[0]

    def numerics(self, prefill_sizes: Sequence[int]) -> Mapping[str, str]:
        return {}

    def decode(
        self,
        row: DecodeLanes,
        residual: Residual,
        states: StateTensors,
        launch: DecodeLaunch,
        *,
        streams: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> Residual:
        weights, norms, table = self.weights, self.weights.norms, states.block_table
        (kv,) = states.cache.unbind(0)
        residual = residual._replace(kept=kept_rows(streams, 0, residual))
        residual = weights.attention.decode(row, residual, norms[1], kv, table, self.tables, launch)
        eps = self.config.norm_eps
        fed = linear(launch.call("mix_in", residual, weights.mix_in, row.slot, eps=eps), STORE)
        state = states.recurrent[RECURRENT]
        slot, width = row.slot[:: launch.tokens_per_row], launch.tokens_per_row
        position = row.position[::width]
        # Never the first token of a sequence: that is a prompt's.
        last = _read(state, slot, position - 1)
        fed_of_rows = fed.view(len(slot), width, WIDTH)
        lives = (row.slot >= 0).view(len(slot), width)
        passed = []
        for token in range(width):
            last = self._advance(last, fed_of_rows[:, token])
            _write(state, torch.where(lives[:, token], slot, -1), position + token, last)
            passed.append(last)
        after = torch.stack(passed, dim=1).flatten(0, 1)
        residual = residual._replace(kept=kept_rows(streams, 1, residual))
        call = launch.call("mix_out", after.to(self.dtype), weights.mix_out, row.slot)
        residual = add_product(call, residual, norms[2], launch)
        residual = residual._replace(kept=kept_rows(streams, 2, residual))
        return weights.mlp.decode(row, residual, norms[3], launch)

    def prefill(
        self,
        lanes: PrefillLanes,
        states: StateTensors,
        attention: ChunkAttention,
        *,
        all_lanes: bool = False,
        streams: Mapping[int, Tensor] = MappingProxyType({}),
        stream: Tensor | None = None,
        launch: PrefillLaunch = ONE_RANK,
    ) -> PrefillEnd:
        """All lanes go all the way, asked for or not."""
        assert stream is None, "its layers are all there"
        weights, norms, slot = self.weights, self.weights.norms, lanes.slot
        x = embed(lanes.token, weights.embedding, slot)
        scratch = PrefillScratch(
            len(x),
            self.config.hidden_size,
            self.config.prefill_width,
            like=weights.embedding,
            launch=launch,
            outlived=all_lanes,
        )
        rms_norm(x, norms[0], slot, eps=EPS, out_dtype=self.dtype, out=scratch.h)
        (kv,) = states.cache.unbind(0)
        attended = weights.attention.attend(
            lanes, kv, states.block_table, self.tables, attention, scratch
        )
        weights.attention.add_output(attended, x, norms[1], slot, scratch)
        _keep(x, 0, streams)
        self._mix(lanes, states.recurrent[RECURRENT], x, scratch)
        _keep(x, 1, streams)
        weights.mlp.prefill(x, norms[3], slot, scratch)
        _keep(x, 2, streams)
        return PrefillEnd((x.index_select(0, lanes.last),), scratch.h if all_lanes else None)

    def prefill_logits(
        self,
        end: PrefillEnd,
        slot_1: Tensor,
        *,
        head: AnyWeight,
        bias: Tensor | None = None,
        hidden: Tensor | None = None,
        launch: PrefillLaunch = ONE_RANK,
    ) -> Tensor:
        assert bias is None and hidden is None, "it has no bias, and nobody reads its output"
        (x_1H,) = end.last
        h = rms_norm(x_1H, self.weights.norms[3], slot_1, eps=EPS, out_dtype=self.dtype)
        return linear(LinearCall(h, head, slot_1, launch=launch), LOGITS)

    def _mix(self, lanes: PrefillLanes, state: Tensor, x: Tensor, scratch: PrefillScratch) -> None:
        """The recurrent layer for a chunk, a token after the other."""
        weights, hidden = self.weights, self.config.hidden_size
        fed = chunk_product(scratch.h, weights.mix_in, None, out=scratch.take(WIDTH))
        slot = lanes.slot[:1]
        last = _read(state, slot, lanes.position[:1] - 1)
        after = []
        for live, new in zip((lanes.slot >= 0).split(1), fed.split(1), strict=True):
            last = torch.where(live[:, None], self._advance(last, new), last)
            after.append(last)
        newest = lanes.position.index_select(0, lanes.last)
        _write(state, slot, newest, last)
        out = scratch.take(hidden, after=WIDTH)
        mixed = torch.cat(after).to(self.dtype)
        norm, slots = weights.norms[2], lanes.slot
        add_chunk_product(mixed, weights.mix_out, None, x, norm, slots, scratch, eps=EPS, out=out)

    def _advance(self, state_ND: Tensor, fed_ND: Tensor) -> Tensor:
        return torch.sigmoid(self.weights.decay.float()) * state_ND + fed_ND.float()


def _read(state_SED: Tensor, slot_N: Tensor, position_N: Tensor) -> Tensor:
    """The states after the tokens at these positions; zeros before the first one."""
    entry = position_N.long() % state_SED.shape[1]
    found = state_SED[slot_N.long().clamp(min=0), entry]
    return torch.where(position_N[:, None] < 0, 0.0, found)


def _write(state_SED: Tensor, slot_N: Tensor, position_N: Tensor, value_ND: Tensor) -> None:
    """Give each live lane's state to its slot; the slots of nobody keep theirs, to the bit."""
    slots, entries = state_SED.shape[:2]
    cells = torch.arange(slots * entries, device=state_SED.device)
    wanted_N = torch.where(slot_N >= 0, slot_N * entries + position_N % entries, -1)
    named_CN = cells[:, None] == wanted_N
    lane_C = named_CN.to(torch.int32).argmax(dim=1)
    live_C1 = named_CN.any(dim=1, keepdim=True)
    flat_CD = state_SED.flatten(0, 1)
    flat_CD.copy_(torch.where(live_C1, value_ND.index_select(0, lane_C), flat_CD))


def _keep(x: Tensor, layer: int, streams: Mapping[int, Tensor]) -> None:
    if layer in streams:
        streams[layer][: len(x)].copy_(x)


# A checkpoint, and what it says, written down once more without any of the above.


def write_checkpoint(path: Path, seed: int = 0, **changes: object) -> Path:
    """A checkpoint of random weights whose tokens differ from each other."""
    path.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    # Weights of lower seeds repeat a token.
    generator = torch.Generator().manual_seed(6 + seed)
    meta = read_config(config, ARCHITECTURE).allocate(device="meta", dtype=torch.float32)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) * (0.3 if tensor.ndim > 1 else 0.2)
        for name, tensor in sorted(meta.named().items())
    }
    # Norms are around 1, and what the state forgets is a few per cent a token.
    tensors |= {name: 1 + tensor for name, tensor in tensors.items() if "norm" in name}
    tensors["model.layers.1.mix.decay"] += 3
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


@torch.no_grad()
def reference_logits(tensors: Mapping[str, Tensor], tokens: Sequence[int]) -> Tensor:
    """Float64 `[T, V]`: the formula, for a whole sequence, from the checkpoint's tensors."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    layer = "model.layers.{}.".format

    def norm(x: Tensor, name: str) -> Tensor:
        weight = weights[name + "norm.weight"]
        return functional.rms_norm(x, (x.shape[-1],), weight, EPS)

    def product(x: Tensor, name: str) -> Tensor:
        return x @ weights[name + ".weight"].T

    def turned(x_THD: Tensor) -> Tensor:
        half = HEAD_DIM // 2
        periods = THETA ** (torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(len(tokens), dtype=torch.float64)[:, None] / periods
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        first, second = x_THD.split(half, dim=2)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)

    x = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
    h, name = norm(x, layer(0)), layer(0) + "self_attn."
    q, k, v = (product(h, f"{name}{part}_proj").unflatten(1, (-1, HEAD_DIM)) for part in "qkv")
    q, k = turned(q), turned(k)
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    attended = functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
    )
    x = x + product(attended.transpose(0, 1).flatten(1), name + "o_proj")

    fed, state, states = product(norm(x, layer(1)), layer(1) + "mix.in"), torch.zeros(WIDTH), []
    for new in fed:
        state = torch.sigmoid(weights[layer(1) + "mix.decay"]) * state + new
        states.append(state)
    x = x + product(torch.stack(states), layer(1) + "mix.out")

    h, name = norm(x, layer(2)), layer(2) + "mlp."
    gated = functional.silu(product(h, name + "gate_proj")) * product(h, name + "up_proj")
    x = x + product(gated, name + "down_proj")
    return product(norm(x, "model."), "lm_head")
