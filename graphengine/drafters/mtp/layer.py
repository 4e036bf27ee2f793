"""Multi-token prediction (MTP) modules, with which a checkpoint drafts its own next tokens.

A module pairs the hidden state of the token at position p with the token at p + 1:

    x = projection [norm_e(E(token)); norm_h(hidden)]     (MiMo has the halves in the other order)
    y = a decoder layer of x
    u = final_norm(y)                                      logits = lm_head(u)

E and lm_head are the target's. `hidden` is the target's hidden state after its final norm, or the
`u` of an earlier run: the previous row's, or the previous module's. Three checkpoint layouts can be
read, one per entry of `LAYOUTS`. The caller makes the projection's input [2H], as it knows where
token and hidden state come from.

Feeding the wrong hidden state, or swapping the halves, raises no error: only acceptance drops.

Letters: N lanes, T tokens of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.epilogues import AddResidual
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.norm import rms_norm
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.norms import plus_one
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.blocks.streams import chunk_product, new_weight, tensors_of
from graphengine.models.composition import blocks_of, experts_of, windows_of
from graphengine.models.contract import ModelConfig, Shaped
from graphengine.models.decoder import DecoderConfig, as_decoder
from graphengine.models.decoder_layer import (
    LayerWeights,
    allocate_layer,
    decode_layer,
    finish_prefill_layer,
    prefill_scratch,
    routed_of,
)
from graphengine.models.launches import (
    ONE_RANK,
    ChunkAttention,
    DecodeLaunch,
    PrefillLaunch,
    Share,
)
from graphengine.models.linears import Linear, Linears, WeightForms, in_formats, refill
from graphengine.models.splitting.rank_sizes import (
    forms_of_rank,
    split_layers,
    spread_experts,
)
from graphengine.models.states import LayerStates
from graphengine.models.weights import RoutedExperts, StoredLinear, StoredWeights, Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpLayout:
    """Where a family of checkpoints keeps its draft modules, by names below a module's prefix.

    prefix        format of module `index`'s prefix; `layer` is the target's layers plus `index`
    several       whether there may be more than one module
    layer         prefix of the decoder layer, below the module's
    ignored       copies of tensors that are shared with the target
    hidden_first  whether the hidden state is the first half of the projection's input
    """

    name: str
    prefix: str
    several: bool
    embedding_norm: str
    hidden_norm: str
    projection: str
    layer: str
    final_norm: str
    ignored: tuple[str, ...] = ()
    hidden_first: bool = False

    def module_prefix(self, layers: int, index: int) -> str:
        return self.prefix.format(index=index, layer=layers + index)

    def first_name(self, layers: int) -> str:
        """The tensor that shows that a checkpoint has this layout; packed ones end differently."""
        return self.module_prefix(layers, 0) + self.projection

    def prefixes(self, names: Iterable[str], layers: int) -> tuple[str, ...]:
        """Prefixes of the modules that exist."""
        linears = {name.rpartition(".")[0] for name in names}
        found: list[str] = []
        while self.linear(prefix := self.module_prefix(layers, len(found))) in linears:
            found.append(prefix)
            if not self.several:
                break
        return tuple(found)

    def linear(self, prefix: str) -> str:
        """Name of the projection of the module with this prefix, without ".weight"."""
        return prefix + self.projection.removesuffix(".weight")


LAYOUTS = (
    MtpLayout(
        name="qwen3",
        prefix="mtp.",
        several=False,
        embedding_norm="pre_fc_norm_embedding.weight",
        hidden_norm="pre_fc_norm_hidden.weight",
        projection="fc.weight",
        layer="layers.0.",
        final_norm="norm.weight",
    ),
    MtpLayout(
        name="mimo",
        prefix="model.mtp_layers.{index}.",
        several=True,
        embedding_norm="token_layernorm.weight",
        hidden_norm="hidden_layernorm.weight",
        projection="input_proj.weight",
        layer="",
        final_norm="final_layernorm.weight",
        hidden_first=True,
    ),
    MtpLayout(
        name="deepseek",
        prefix="model.layers.{layer}.",
        several=True,
        embedding_norm="enorm.weight",
        hidden_norm="hnorm.weight",
        projection="eh_proj.weight",
        layer="",
        final_norm="shared_head.norm.weight",
        ignored=("embed_tokens.weight", "shared_head.head.weight"),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpConfig:
    """The draft modules of a checkpoint.

    layout    one of `LAYOUTS`
    prefixes  prefix of each module's tensors, in order
    decoder   a decoder whose layers are the modules', one each
    norm_eps  epsilon of the norms before the projection
    """

    layout: MtpLayout
    prefixes: tuple[str, ...]
    decoder: DecoderConfig
    norm_eps: float

    @classmethod
    def of_target(
        cls,
        target: ModelConfig,
        layout: MtpLayout,
        prefixes: tuple[str, ...],
        expert_modules: tuple[int, ...] | None = None,
        *,
        full_attention: bool = False,
    ) -> Self:
        """Modules with layers like the target's. ValueError if modules cannot have such layers.

        expert_modules  modules that have experts; None: all, if the target has any
        full_attention  whether modules are known to have no window though target layers have one
        """
        decoder = as_decoder(target)
        like = None if decoder is None else decoder.attending_decoder()
        if decoder is None or like is None:
            raise ValueError(
                f"draft modules (MTP) of a {target.architecture} are not supported: it has no "
                f"layers as modules have them"
            )
        windows, experts = windows_of(decoder), experts_of(decoder)
        if any(windows) and not full_attention:
            raise ValueError(
                f"draft modules (MTP) of a {target.architecture} with windows of {max(windows)} "
                f"tokens are not supported, unless mtp_layer_types says that they have full "
                f"attention: a module has no window"
            )
        if any(each.post_norm for layer in decoder.layers for each in layer):
            raise ValueError(
                f"draft modules (MTP) of a {target.architecture} are not supported: norms follow "
                f"its blocks, and no module's"
            )
        if expert_modules is None:
            expert_modules = () if experts is None else tuple(range(len(prefixes)))
        ((attention, dense),) = like.layers
        routed = dense if experts is None else dense._replace(block=experts)
        layers = tuple(
            (attention, routed if index in expert_modules else dense)
            for index in range(len(prefixes))
        )
        return cls(
            layout=layout,
            prefixes=prefixes,
            decoder=replace(like, layers=layers),
            norm_eps=like.norm_eps,
        )

    @property
    def modules(self) -> int:
        return len(self.prefixes)

    @property
    def hidden_first(self) -> bool:
        return self.layout.hidden_first

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def output_eps(self) -> float:
        """The epsilon of each module's final norm."""
        return self.decoder.norm_eps

    @property
    def states(self) -> tuple[LayerStates, ...]:
        """The states that the modules keep, one layer per module."""
        return self.decoder.states

    @property
    def table_bytes(self) -> int:
        """Bytes of the copies of norms with 1 added, which are not among the weights."""
        decoder = self.decoder
        if not decoder.norms_plus_one:
            return 0
        attending = [each for each in blocks_of(decoder) if isinstance(each, GroupedQueryAttention)]
        of_heads = sum(2 * each.head_dim for each in attending if each.qk_norm)
        return 4 * (5 * self.modules * decoder.hidden_size + of_heads)

    def linears(self, draft_vocab_size: int | None = None) -> Linears:
        """Linears of one run of a module: its projection, its layer's linears, and lm_head.

        draft_vocab_size  rows of a trimmed lm_head; None: the target's
        """
        hidden, decoder = self.hidden_size, self.decoder
        if draft_vocab_size is not None:
            decoder = replace(decoder, vocab_size=draft_vocab_size)
        projection = {"projection": Linear("residual", hidden, 2 * hidden)}
        formats = [self.forms.format_of(self.projection(prefix)) for prefix in self.prefixes]
        of_layers = decoder.linears_of([prefix + self.layout.layer for prefix in self.prefixes])
        return {**in_formats(projection, {"projection": formats}), **of_layers}

    @property
    def forms(self) -> WeightForms:
        """How packed weights are stored, lm_head among them."""
        return self.decoder.forms

    def stored_as(self, forms: WeightForms) -> Self:
        """A copy with weights stored in `forms`, for a target that is stored in them, too."""
        return replace(self, decoder=self.decoder.stored_as(forms))

    def named_as(self, tensors: Mapping[str, Shaped]) -> Self:
        """A copy where experts have the names and layout of a checkpoint with these tensors."""
        prefixes = [prefix + self.layout.layer for prefix in self.prefixes]
        return replace(self, decoder=self.decoder.named_as(tensors, prefixes))

    def projection(self, prefix: str) -> str:
        """The checkpoint's name of the projection of the module with this prefix."""
        return self.layout.linear(prefix)

    def of_rank(
        self, share: Share, *, expert_parallel: bool = False, data_parallel: bool = False
    ) -> MtpConfig:
        """One rank's part: layers split as the model's are, by `of_rank`; whole projections.

        ValueError for sizes that the ranks do not divide.
        """
        if share.ranks == 1:
            return self
        if data_parallel:
            return replace(self, decoder=spread_experts(self.decoder, share))
        part = replace(self, decoder=split_layers(self.decoder, share, expert_parallel))
        whole, own = (
            allocate_mtp_weights(each, device="meta", dtype=torch.float32) for each in (self, part)
        )
        return part.stored_as(forms_of_rank(part.forms, whole, own, share.ranks))

    def first(self, modules: int) -> MtpConfig:
        """A copy with only the first `modules` modules."""
        decoder = replace(self.decoder, layers=self.decoder.layers[:modules])
        return replace(self, prefixes=self.prefixes[:modules], decoder=decoder)


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpModuleWeights:
    """Weights of one module; `projection` is `[H, 2H]`, its halves in the layout's order."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    projection: AnyWeight
    layer: LayerWeights
    final_norm: Tensor

    def linears(self, layout: MtpLayout, prefix: str) -> list[StoredLinear]:
        """The module's linears. Each rank has the whole projection."""
        name = layout.linear(prefix)
        own = StoredLinear(self.projection, ((name, self.projection.shape[0]),))
        return [own, *self.layer.linears()]

    def stored(self, layout: MtpLayout, prefix: str) -> dict[str, Weight]:
        """The unpacked tensors under `prefix`, by name."""
        projection, *_ = self.linears(layout, prefix)
        return {
            prefix + layout.embedding_norm: Weight(self.embedding_norm),
            prefix + layout.hidden_norm: Weight(self.hidden_norm),
            **projection.views(),
            prefix + layout.final_norm: Weight(self.final_norm),
            **self.layer.stored(),
        }

    def with_norms_plus_one(self) -> MtpModuleWeights:
        """A copy with 1 added to the norms, for checkpoints whose norms lack it."""
        return replace(
            self,
            embedding_norm=plus_one(self.embedding_norm),
            hidden_norm=plus_one(self.hidden_norm),
            layer=self.layer.with_norms_plus_one(),
            final_norm=plus_one(self.final_norm),
        )

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        own = [self.embedding_norm, self.hidden_norm, *tensors_of(self.projection), self.final_norm]
        return own + self.layer.tensors()


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpWeights(StoredWeights):
    """All draft modules, on one device, in the model dtype."""

    config: MtpConfig
    modules: tuple[MtpModuleWeights, ...]

    def opened(self) -> tuple[MtpModuleWeights, ...]:
        """The modules ready to run: with copies of the norms where the checkpoint's lack 1."""
        if not self.config.decoder.norms_plus_one:
            return self.modules
        return tuple(module.with_norms_plus_one() for module in self.modules)

    def refresh(self, opened: Iterable[MtpModuleWeights]) -> None:
        """Recompute in place the norms that `opened` has made, after weights have changed."""
        for held, made in zip(opened, self.opened(), strict=True):
            refill(held.tensors(), made.tensors())

    def linears(self) -> list[StoredLinear]:
        """Every module's linears."""
        layout, named = self.config.layout, zip(self.modules, self.config.prefixes, strict=True)
        return [each for module, prefix in named for each in module.linears(layout, prefix)]

    def stored(self) -> dict[str, Weight]:
        """The unpacked tensors, by name."""
        names: dict[str, Weight] = {}
        for module, prefix in zip(self.modules, self.config.prefixes, strict=True):
            names |= module.stored(self.config.layout, prefix)
        return names

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        return [tensor for module in self.modules for tensor in module.tensors()]

    @property
    def routed(self) -> RoutedExperts | None:
        """The experts of the modules that have some; their routes are not recorded."""
        return routed_of([module.layer for module in self.modules])

    def kv_scales(self) -> dict[str, Tensor]:
        """KV scales of every module, by the prefix of its attention."""
        layer = self.config.layout.layer
        return {
            f"{prefix}{layer}self_attn.": scales
            for module, prefix in zip(self.modules, self.config.prefixes, strict=True)
            if (scales := module.layer.attention.kv_scales) is not None
        }


def allocate_mtp_weights(config: MtpConfig, *, device: str, dtype: torch.dtype) -> MtpWeights:
    """Uninitialised weights of the right shapes; `device="meta"` allocates nothing."""
    hidden = config.hidden_size

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    modules = tuple(
        MtpModuleWeights(
            embedding_norm=new(hidden),
            hidden_norm=new(hidden),
            projection=new_weight(
                config.forms,
                config.projection(prefix),
                (hidden, 2 * hidden),
                device=device,
                dtype=dtype,
            ),
            layer=allocate_layer(
                prefix + config.layout.layer,
                layer,
                hidden,
                config.forms,
                device=device,
                dtype=dtype,
            ),
            final_norm=new(hidden),
        )
        for prefix, layer in zip(config.prefixes, config.decoder.layers, strict=True)
    )
    return MtpWeights(config=config, modules=modules)


def mtp_decode(
    module: MtpModuleWeights,
    combined_N2H: Tensor,
    residual: Residual,
    row: DecodeLanes,
    kv: Tensor,
    block_table: Tensor,
    tables: RopeTables,
    launch: DecodeLaunch,
) -> Residual:
    """Run a module for `row`'s lanes: its projection, then the kernels of one layer.

    Returns its output, scaled for the final norm.

    combined_N2H  the normed embedding and hidden state, in the layout's order
    residual      `x` is zero in live lanes; updated in place. The other parts are not read.
    kv            the module's layer of the cache: each live lane's keys and values are written at
                  `row.position`
    tables        the target's
    launch        with plans of `MtpConfig.linears`

    The result's `scaled` and `squares` give logits by `lm_head`, as the target's do; they also give
    the hidden state that the next run reads.
    """
    # Each rank has the whole projection and its whole input, so there is nothing to all-reduce.
    call = launch.call("projection", combined_N2H, module.projection, row.slot)
    residual = linear(call, AddResidual(residual, module.layer.input_norm))
    return decode_layer(
        module.layer, module.final_norm, row, residual, kv, block_table, tables, launch
    )


def mtp_prefill(
    config: MtpConfig,
    module: MtpModuleWeights,
    combined_T2H: Tensor,
    chunk: PrefillLanes,
    kv: Tensor,
    block_table: Tensor,
    tables: RopeTables,
    attention: ChunkAttention,
    *,
    launch: PrefillLaunch = ONE_RANK,
) -> Tensor:
    """Run a module for a chunk's lanes: `u` `[T, H]` after the final norm, in the model dtype.

    Arguments as in `mtp_decode`; `attention` as in `Model.prefill`. Padded lanes hold anything.
    """
    layer = module.layer
    lanes, hidden = len(combined_T2H), config.hidden_size
    x = combined_T2H.new_empty(lanes, hidden)
    x = chunk_product(
        combined_T2H,
        module.projection,
        None,
        out=x,
        activations=launch.activations,
        any_lanes=launch.any_lanes,
    ).float()
    scratch = prefill_scratch([layer], lanes, like=combined_T2H, launch=launch)
    rms_norm(
        x,
        layer.input_norm,
        chunk.slot,
        eps=config.output_eps,
        out_dtype=scratch.h.dtype,
        out=scratch.h,
    )
    attended = layer.attention.attend(chunk, kv, block_table, tables, attention, scratch)
    finish_prefill_layer(layer, module.final_norm, x, attended, chunk.slot, scratch)
    return scratch.h
