"""How a checkpoint stores the weight of a linear, as its config says."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from graphengine.kernels.linear.kinds import Kind, KindName
from graphengine.kernels.linear.quantised import WeightFormat
from graphengine.models.hf.config_schema import unsupported

Layout = Literal["codes", "int32_rows", "awq", "gptq", "halves"]
"""How a checkpoint lays codes out: one an element; as int32 along the rows of the weight; as AWQ's
gemm kernel has them; as int32 along the rows of the transposed weight; two in a byte."""


def plain_layout(kind: Kind) -> Layout:
    """One code an element, or two in a byte where the kind has no such elements."""
    return "codes" if kind.code.stored else "halves"


class WeightScheme(NamedTuple):
    """How the weight of a linear is stored, and the format it is read into.

    kind        its name in the table of kinds
    format      that the weight is read into
    codes       names of the tensor of codes, below the linear's name like all names here; one of
                them must be there
    scales      names of the tensor of scales; one of them must be there
    signed      whether scales may be negative or 0
    factor      of stored scales, in float32
    whole       name of a factor on all scales
    inverse     whether scales are divided by `whole` instead
    zeros       name of zero points; if the format has none they may still be there, but must
                change nothing
    zero_shift  added to a stored zero point
    factors     name of the factors on scales of blocks, if the format has them
    order       name of the columns' group indices, if columns may be in another order
    needs_order whether these indices must be there
    unread      names of tensors that concern activations alone
    rows_if_0   name of a number that is 0 if codes are stored in rows, as they must be; None: none
    notes       settings of the config that are ignored, for the log
    """

    layout: Layout
    kind: KindName
    format: WeightFormat
    codes: tuple[str, ...] = ("weight",)
    scales: tuple[str, ...] = ("weight_scale",)
    signed: bool = False
    factor: float = 1.0
    whole: str | None = None
    inverse: bool = False
    zeros: str | None = None
    zero_shift: int = 0
    factors: str | None = None
    order: str | None = None
    needs_order: bool = False
    unread: tuple[str, ...] = ("input_scale", "input_zero_point", "output_scale")
    rows_if_0: str | None = None
    notes: tuple[str, ...] = ()


class Rule(NamedTuple):
    """How linears that match are stored; `scheme` None: they are not quantised."""

    matches: Callable[[str], bool]
    scheme: WeightScheme | None


class Quantisation(NamedTuple):
    """A config's rules for a model's weights: the first rule that matches a linear decides.

    stored_names  names of modules in the files, where they differ; rules may use either
    """

    method: str
    rules: tuple[Rule, ...]
    stored_names: Mapping[str, str] = MappingProxyType({})

    def scheme(self, linear: str) -> WeightScheme | None:
        """The scheme of a linear, by its checkpoint name ("lm_head"); None: it is not quantised."""
        names = {linear, self._stored(linear)}
        return next((rule.scheme for rule in self.rules if any(map(rule.matches, names))), None)

    def _stored(self, linear: str) -> str:
        """The linear's name in the files; stacked experts are named after their module there."""
        if linear in self.stored_names:
            return self.stored_names[linear]
        module, dot, name = linear.rpartition(".")
        return self.stored_names.get(module, module) + dot + name

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of all schemes, each once."""
        schemes = [rule.scheme for rule in self.rules if rule.scheme is not None]
        return tuple(dict.fromkeys(note for scheme in schemes for note in scheme.notes))


GROUPS = (16, 32, 64, 128, 256, 512, 1024)
"""Numbers of columns that may share a scale, besides all columns."""
HEAD = "lm_head"
ABOUT_MAKING = """
    quant_method meta tokenizer dataset damp_percent damp_auto_increment true_sequential backend
    static_groups mse model_name_or_path model_file_base_name model_seqlen batch_size
    pad_token_id max_input_length cache_block_outputs use_cuda_fp16 use_exllama exllama_config
    disable_exllama act_group_aware block_name_to_quantize module_name_preceding_first_block
    offload_to_disk offload_to_disk_path quantizer hyb_act fuse_max_seq_len do_fuse
    modules_to_fuse autoround_version iters lr minmax_lr nsamples seqlen train_bs
    low_gpu_mem_usage enable_quanted_input enable_minmax_tuning scale_dtype data_type amp
    gradient_accumulate_steps provider quant_block_list to_quant_block_names supported_types
    enable_norm_bias_tuning nblocks
"""
"""Keys that say how a quantised model was made and with what to run it; they change nothing."""


def read_choice(
    config: Mapping[str, Any], key: str, known: Sequence[Any], inside: str, default: Any = None
) -> Any:
    """The value of a key, one of `known`. ValueError names key, value and what is known."""
    value = config.get(key, default)
    # True equals 1 in Python.
    if not any(value == each and type(value) is type(each) for each in known):
        shown = ", ".join("null" if each is None else repr(each) for each in known)
        raise unsupported(f"{inside}.{key}", value, shown)
    return value


def check_keys(config: Mapping[str, Any], known: str, inside: str) -> None:
    """Raise ValueError for the first non-empty key that is not in `known`, a text of names."""
    names = sorted(known.split())
    for key, value in config.items():
        if key not in names and value not in (None, {}, [], False):
            raise unsupported(f"{inside}.{key}", value, f"null, or the keys {', '.join(names)}")


def read_names(config: Mapping[str, Any], key: str, inside: str) -> list[str]:
    """A list of strings, empty where it is missing or null. ValueError for anything else."""
    value = config.get(key)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise unsupported(f"{inside}.{key}", value, "a list of strings, null")
    return value


def read_size(
    config: Mapping[str, Any], key: str, inside: str, known: Sequence[int], default: Any = None
) -> int:
    """Columns that share a scale, 0 for all, which configs give as -1."""
    value = read_choice(config, key, [*known, -1], inside, default)
    return 0 if value == -1 else int(value)


def from_start(text: str, inside: str) -> Callable[[str], bool]:
    """Whether a regular expression matches a linear's name from its start.

    ValueError, with key and value, if `text` is not a regular expression.
    """
    try:
        expression = re.compile(text)
    except re.error as error:
        raise unsupported(inside, text, f"regular expressions: {error}") from error
    return lambda linear: expression.match(linear) is not None


def among_names(names: Sequence[str], inside: str) -> Callable[[str], bool]:
    """Whether `modules_to_not_convert` lists a linear, as transformers reads the list.

    An entry is the end of a name, or a regular expression for a name's whole parts from its start.
    """
    starts = [from_start(rf"(?:{name})(?:(?<=\.)|(?=\.)|$)", inside) for name in names]
    ends = tuple(names)
    return lambda linear: linear.endswith(ends) or any(starts_so(linear) for starts_so in starts)


def is_head(linear: str) -> bool:
    """Whether a linear is lm_head, which methods that quantise layers leave as it is."""
    return linear.rpartition(".")[2] == HEAD


def always(linear: str) -> bool:
    return True
