"""The residual stream between blocks: how a product is added to it, and prefill's scratch memory.

Ranks sum their parts between a block's last product and the addition to the stream: by `reduce`,
or, in a chunk whose lanes they split, by `SplitStream.add`. With one rank, decode has one kernel
for product and addition.

Letters: N or T lanes, H hidden, K columns of a weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import pad

from graphengine.kernels.comm.push_residual import push_to_residual
from graphengine.kernels.experts.packed.weights import PackedExperts
from graphengine.kernels.linear.call import AnyWeight, LinearCall, in_order
from graphengine.kernels.linear.epilogues import AddResidual, Store, StoreSquares
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.packed import PackedWeight, empty_packed
from graphengine.kernels.linear.prefill.lane_codes import (
    ActivationKind,
    LaneCodes,
    code_bytes,
    new_lane_codes,
    quantise_lanes,
)
from graphengine.kernels.linear.prefill.linear_chunk import linear_chunk
from graphengine.kernels.linear.prefill.packed_chunk import packed_chunk_product
from graphengine.kernels.linear.prefill.packed_chunk_fp8 import takes_fp8
from graphengine.kernels.linear.residual import Product, Residual, StreamCopy, sums_of_squares
from graphengine.kernels.linear.residual_sum import add_to_residual
from graphengine.kernels.norm_rope.activation import Activation
from graphengine.kernels.norm_rope.layer_norm import (
    add_layer_norm,
    layer_norm,
    layer_norm_residual,
)
from graphengine.kernels.norm_rope.norm import add_rms_norm, rms_norm
from graphengine.kernels.norm_rope.post_norm import add_normed, add_normed_rms_norm
from graphengine.models.blocks.norms import (
    LaneKinds,
    LayerNorm,
    NextNorm,
    NormsByKind,
    ReadNorm,
    Sandwich,
)
from graphengine.models.launches import (
    ONE_RANK,
    DecodeLaunch,
    PrefillLaunch,
    SplitStream,
)
from graphengine.models.linears import WeightForms


def new_weight(
    forms: WeightForms,
    linear: str,
    shape: tuple[int, int],
    *,
    swiglu: bool = False,
    device: str,
    dtype: torch.dtype,
) -> AnyWeight:
    """An uninitialised weight whose first linear is `linear`; "meta" allocates nothing."""
    form = forms.get(linear)
    if form is None:
        return torch.empty(shape, device=device, dtype=dtype)
    return empty_packed(form, shape, swiglu=swiglu, device=device)


class NewWeight(Protocol):
    """Makes one weight of a block, by its name there."""

    def __call__(
        self, name: str, rows: int, columns: int, *, swiglu: bool = False
    ) -> AnyWeight: ...


def new_weights(
    forms: WeightForms,
    prefix: str,
    first_linears: Mapping[str, str],
    *,
    device: str,
    dtype: torch.dtype,
) -> NewWeight:
    """A function that makes a block's weights as `new_weight` does.

    first_linears  first checkpoint linear fused into each weight, after `prefix`
    """

    def weight(name: str, rows: int, columns: int, *, swiglu: bool = False) -> AnyWeight:
        first, shape = prefix + first_linears[name], (rows, columns)
        return new_weight(forms, first, shape, swiglu=swiglu, device=device, dtype=dtype)

    return weight


def tensors_of(*weights: AnyWeight | PackedExperts | None) -> list[Tensor]:
    """The tensors of those weights and biases that are not None."""
    there = [each for each in weights if each is not None]
    return [
        tensor
        for each in there
        for tensor in ([each] if isinstance(each, Tensor) else each.tensors)
    ]


def add_product(
    call: LinearCall, residual: Residual, next_norm_H: NextNorm, launch: DecodeLaunch
) -> Residual:
    """Add the product of all ranks to `residual`, scaled for `next_norm`; see `AddResidual`.

    If ranks split a weight by columns, each computes a part of every sum; the bias is added to the
    whole. With `reduce`, product and addition are two kernels. A product that is normed itself
    takes two as well: the second kernel does the norm and the addition, and the product's inputs
    have no norm. A LayerNorm that reads the stream next is one more kernel. With several ranks,
    each divides the squares of the inputs by its own K.
    """
    if isinstance(next_norm_H, NormsByKind):
        next_norm_H = next_norm_H.sound
    if isinstance(next_norm_H, LayerNorm):
        weight, bias, eps = next_norm_H
        residual = add_product(call, residual, weight, launch)
        return layer_norm_residual(residual, weight, bias, call.slot_N, eps=eps, pdl=launch.pdl)
    if isinstance(next_norm_H, Sandwich):
        assert call.squares_TN is None, "no norm of the inputs here"
        post, following, eps, _, factor = next_norm_H
        product, slot = _whole_product(call, launch), call.slot_N
        return add_normed(
            product, post, residual, following, slot, eps=eps, factor_1=factor, pdl=launch.pdl
        )
    if launch.reduce is None or launch.peers is not None:
        return linear(call, AddResidual(residual, next_norm_H, launch.peers))
    part = part_product(call)
    return add_part(part, call.slot_N, residual, next_norm_H, bias=call.bias, launch=launch)


def add_part(
    part_NH: Tensor,
    slot_N: Tensor,
    residual: Residual,
    next_norm_H: Tensor,
    *,
    bias: Tensor | None = None,
    launch: DecodeLaunch,
) -> Residual:
    """Add the sum of all ranks' parts to `residual`; `part_NH` is this rank's, float32."""
    if launch.peers is not None:
        return push_to_residual(
            launch.peers, part_NH, slot_N, residual, next_norm_H, bias_H=bias, pdl=launch.pdl
        )
    assert launch.reduce is not None, "one rank has no parts"
    whole = launch.reduce(part_NH)
    return add_to_residual(whole, slot_N, residual, next_norm_H, bias_H=bias, pdl=launch.pdl)


def part_product(call: LinearCall) -> Tensor:
    """Float32 `[N, H]`: this rank's part of a product, without a bias."""
    return linear(call._replace(bias=None), Store(dtype=torch.float32))


def _whole_product(call: LinearCall, launch: DecodeLaunch) -> Product:
    """The product of all ranks, and the sums of its squares."""
    if launch.reduce is None or launch.peers is not None:
        return linear(call, StoreSquares(peers=launch.peers))
    whole = launch.reduce(part_product(call))
    whole = whole if call.bias is None else whole + call.bias.float()
    return Product(whole, sums_of_squares(whole, 1).contiguous())


def kept_rows(
    streams: Mapping[int, Tensor], layer: int, residual: Residual, scale: float = 1.0
) -> StreamCopy | None:
    """Where decode writes the stream after a layer; None: nowhere."""
    if layer not in streams:
        return None
    return StreamCopy(streams[layer][: len(residual.x)], scale)


def keep_stream(x: Tensor, layer: int, streams: Mapping[int, Tensor], scale: float = 1.0) -> None:
    """Copy a chunk's stream after the layer, times `scale`, to where it is kept, if anywhere."""
    if layer not in streams:
        return
    kept = streams[layer][: len(x)]
    if scale == 1:
        kept.copy_(x)
    else:
        torch.mul(x, scale, out=kept)


class PrefillScratch:
    """The memory that the layers of a chunk of T lanes compute in, one after the other.

    It is one piece of memory, since each product's result is needed only until the next one has
    read it. Queries, keys and values come first, and the queries after RoPE next to them.
    Attention's sums then overwrite the former, and its output product overwrites the latter. Gate
    and up overwrite all of it, or only the SwiGLU's result does where one kernel computes it
    (`fused`). The rounded inputs (codes) of one product have a part of their own.

    h         `[T, H]` in the dtype of `like`: the normed stream that each layer reads
    width     values besides `h` for each lane
    launch    how the kernels are launched
    coded     columns of the widest inputs that `launch` has rounded
    outlived  whether `h` has separate memory, so that keeping it does not keep the rest
    split     the stream, where each rank has some of its lanes: then `h` is its `normed_NH`, and
              products go to `part`, which otherwise is `h`; None: every rank has all lanes
    kinds     the lanes by kind, where layers compute text and sound with weights of their own
    """

    def __init__(
        self,
        lanes: int,
        hidden: int,
        width: int,
        *,
        like: Tensor,
        launch: PrefillLaunch = ONE_RANK,
        coded: int = 0,
        outlived: bool = False,
        split: SplitStream | None = None,
        kinds: LaneKinds | None = None,
    ) -> None:
        self._lanes = lanes
        self.kinds = kinds
        self.launch = launch
        self.split = split
        # Whole pieces of 16 bytes, so that the memory after them is aligned for copies.
        codes = -(-code_bytes(lanes, coded) // 16) * 16 // like.itemsize if coded else 0
        sizes = [codes, lanes * hidden, lanes * width]
        if outlived:
            h = like.new_empty(lanes * hidden)
            sizes[1] = 0
        # One allocation, as each one of 1 to 10 MB takes 20 MB of a graph's pool.
        coding, shared, self._memory = torch.split(like.new_empty(sum(sizes)), sizes)
        # Where ranks store into `h`, a product's part lies elsewhere.
        self.part = (h if outlived else shared).view(lanes, -1)
        self.h = self.part if split is None else split.normed_NH
        self._codes = coding.view(torch.uint8) if codes else None

    def lane_of(self, stream_TH: Tensor, index_1: Tensor) -> Tensor:
        """New `[1, H]`: one lane of the stream, whichever rank has it; all ranks call this."""
        if self.split is None:
            return stream_TH.index_select(0, index_1)
        return self.split.gather_lane(stream_TH, index_1)

    def take(self, columns: int, *, after: int = 0) -> Tensor:
        """Uninitialised `[T, columns]`, dense, in the memory past that of `after` columns."""
        start = self._lanes * after
        return self._memory[start : start + self._lanes * columns].view(self._lanes, columns)

    def product(
        self,
        x: Tensor,
        weight: AnyWeight,
        bias: Tensor | None,
        *,
        out: Tensor,
        swiglu: bool = False,
        activation: Activation = "silu",
    ) -> Tensor:
        """`chunk_product` with this launch and its adapters; rounds inputs into this memory."""
        adapters, pdl = self.launch.adapters, self.launch.pdl
        chunk_product(
            x,
            weight,
            bias,
            out=out,
            swiglu=swiglu,
            activation=activation,
            pdl=pdl,
            activations=self.launch.activations,
            codes=self._codes,
            delta=self.delta(x, weight) if swiglu else None,
            any_lanes=self.launch.any_lanes,
        )
        if adapters is not None and not swiglu:
            adapters.add_to_chunk(out, x, weight, pdl=pdl)
        return out

    def delta(self, x: Tensor, weight: AnyWeight) -> Tensor | None:
        """The adapters' addition to a product, for a kernel that adds it; None: none."""
        adapters = self.launch.adapters
        return None if adapters is None else adapters.chunk_delta(x, weight, pdl=self.launch.pdl)


def coded_columns(weights: Iterable[AnyWeight], activations: ActivationKind | None) -> int:
    """Columns of the widest inputs that `chunk_product` rounds for these weights."""
    return max((each.shape[1] for each in weights if _is_coded(each, activations)), default=0)


def _is_coded(weight: AnyWeight, activations: ActivationKind | None) -> TypeGuard[PackedWeight]:
    if activations is None or isinstance(weight, Tensor):
        return False
    return takes_fp8(weight.format, weight.shape[1])


def chunk_product(
    x: Tensor,
    weight: AnyWeight,
    bias: Tensor | None,
    *,
    out: Tensor,
    swiglu: bool = False,
    activation: Activation = "silu",
    pdl: bool = False,
    activations: ActivationKind | None = None,
    codes: Tensor | None = None,
    delta: Tensor | None = None,
    any_lanes: bool = False,
) -> Tensor:
    """`x @ weight^T` (+ bias) into `out`: by the BLAS where the weight is not packed.

    swiglu       for a packed weight: `out` is silu(gate) * up
    activation   in place of silu
    activations  format that x is rounded to, if the weight's kernel takes it
    codes        uint8, of `code_bytes` or more: memory for the rounded x; None: new memory
    delta        for a packed weight: `[N, M]`, added to the product before its activation
    any_lanes    whether no bit of a lane may depend on the number of lanes
    """
    if not isinstance(weight, Tensor):
        x, weight = in_order(x, weight)
        inputs: Tensor | LaneCodes = x
        if _is_coded(weight, activations):
            rounded = None if codes is None else new_lane_codes(codes, *x.shape)
            inputs = quantise_lanes(x, out=rounded, pdl=pdl)
        return packed_chunk_product(
            inputs,
            weight,
            bias,
            out=out,
            swiglu=swiglu,
            activation=activation,
            pdl=pdl,
            delta=delta,
            any_lanes=any_lanes,
        )
    assert not swiglu and delta is None, f"{swiglu=} of a weight that is not packed"
    if any_lanes:
        return linear_chunk(x, weight, bias, out=out, pdl=pdl)
    x, weight = whole_pieces(x, weight)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def whole_pieces(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`x [..., K]` and `weight [..., K]` for a BLAS. On a CPU in half precision, rows are padded
    with zeros to multiples of 64 bytes.

    oneDNN with AMX reads a row of `x` in pieces of 64 bytes. Values past the row's end, in the next
    row, are multiplied by 0: a NaN in a padded lane would reach the lane before it.
    """
    past = -x.shape[-1] % (64 // x.itemsize)
    if x.device.type != "cpu" or x.itemsize != 2 or not past:
        return x, weight
    return pad(x, (0, past)), pad(weight, (0, past))


def add_chunk_product(
    x_NK: Tensor,
    weight_HK: AnyWeight,
    bias: Tensor | None,
    stream_NH: Tensor,
    next_norm_H: NextNorm,
    slot_N: Tensor,
    scratch: PrefillScratch,
    *,
    eps: float,
    out: Tensor,
) -> None:
    """Add the product of all ranks to `stream` in place, and write it, normed for its next reader,
    to `scratch.h`.

    `out`, `[N, H]`, may take the product, and may be `scratch.h`. Each rank's part is rounded to
    its dtype before the parts are summed; in decode they are float32. Where the stream is split,
    only this rank's lanes of it change.
    """
    launch, split = scratch.launch, scratch.split
    if split is not None:
        assert isinstance(next_norm_H, Tensor), "what reads a split stream is an RMSNorm"
        part = scratch.product(x_NK, weight_HK, None, out=scratch.part)
        split.add(part, stream_NH, next_norm_H, slot_N, bias, eps)
        return
    if launch.reduce is None:
        whole = scratch.product(x_NK, weight_HK, bias, out=out)
    else:
        whole = launch.reduce(scratch.product(x_NK, weight_HK, None, out=out))
        whole = whole if bias is None else whole + bias
    add_chunk(whole, stream_NH, next_norm_H, slot_N, scratch, eps=eps)


def add_chunk(
    whole_NH: Tensor,
    stream_NH: Tensor,
    next_norm_H: NextNorm,
    slot_N: Tensor,
    scratch: PrefillScratch,
    *,
    eps: float,
) -> None:
    """Add a block's output, summed over ranks, to `stream` in place, and write it, normed for its
    next reader, to `scratch.h`, which may be the output itself.
    """
    launch, h = scratch.launch, scratch.h
    if isinstance(next_norm_H, NormsByKind):
        assert scratch.kinds is not None, "the lanes' kinds are known"
        for norm_H, of_kind_N in zip(next_norm_H, scratch.kinds, strict=True):
            add_chunk(whole_NH, stream_NH, norm_H, of_kind_N, scratch, eps=eps)
        return
    if isinstance(next_norm_H, Sandwich):
        post, following, post_eps, normed, factor = next_norm_H
        assert eps == post_eps, f"norms of two {eps=}, {post_eps=}"
        add_normed_rms_norm(
            stream_NH,
            whole_NH,
            post,
            following,
            slot_N,
            eps=eps,
            out_dtype=h.dtype,
            factor_1=factor,
            out=h,
            pdl=launch.pdl,
        )
        if not normed:
            h.copy_(stream_NH)
        return
    if isinstance(next_norm_H, LayerNorm):
        weight, bias, eps = next_norm_H
        add_layer_norm(stream_NH, whole_NH, weight, bias, slot_N, eps=eps, out=h, pdl=launch.pdl)
        return
    add_rms_norm(
        stream_NH, whole_NH, next_norm_H, slot_N, eps=eps, out_dtype=h.dtype, out=h, pdl=launch.pdl
    )


def norm_rows(
    x_NH: Tensor,
    norm: ReadNorm,
    slot_N: Tensor,
    *,
    eps: float,
    out: Tensor,
    pdl: bool = False,
    kinds: LaneKinds | None = None,
) -> None:
    """Write the stream's live lanes, normed, to `out`; `eps` is of an RMSNorm.

    kinds  the lanes by kind, for `NormsByKind`
    """
    if isinstance(norm, NormsByKind):
        assert kinds is not None, "the lanes' kinds are known"
        for own, of_kind_N in zip(norm, kinds, strict=True):
            norm_rows(x_NH, own, of_kind_N, eps=eps, out=out, pdl=pdl)
    elif isinstance(norm, LayerNorm):
        weight, bias, eps = norm
        layer_norm(x_NH, weight, bias, slot_N, eps=eps, out_dtype=out.dtype, out=out, pdl=pdl)
    else:
        rms_norm(x_NH, norm, slot_N, eps=eps, out_dtype=out.dtype, out=out, pdl=pdl)
