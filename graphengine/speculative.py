"""The embedding program's options of speculation: the drafter, and which drafts are accepted.

Each drafter's options are one `Mode` here; `options/drafts/mode.py` says what modes have in common,
and `graphengine.drafters` has the drafters themselves. Options alone read and allocate nothing:
whether a mode fits a checkpoint is found out when an engine opens.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

from graphengine.kernels.linear.call import MAX_LANES
from graphengine.kernels.step.record import MAX_DRAFTS
from graphengine.options.checks import (
    INT32_MAX,
    check_at_least,
    check_path,
    is_finite,
    is_int,
    is_number,
    keep_plain_numbers,
)
from graphengine.options.drafts.draft_trees import (
    StaticTree,
    Tree,
    TreeOption,
    check_tree,
    read_tree,
)
from graphengine.options.drafts.draft_vocabulary import DraftVocabulary, describe_vocabulary
from graphengine.options.drafts.jump_forward import JumpForward
from graphengine.options.drafts.mode import Mode, check_drafts

log = logging.getLogger(__name__)

MAX_NGRAM = 16
MAX_MATCH = 64
_USUAL_DRAFTS = 3
# With more live requests than this, a step is better spent on them than on drafts.
AUTO_MAX_LIVE = 32
FORCE_ACCEPTED = "GRAPHENGINE_FORCE_ACCEPTED"

Style = Literal["eagle", "vanilla"]
Feed = Literal["chained", "target"]
PathName = str | os.PathLike[str]


class ModuleMode(Mode):
    """Options of a module, which drafts chains or a tree."""

    __slots__ = ()

    tree: TreeOption | None
    min_confidence: float | None

    trims_vocabulary: ClassVar[bool] = True

    @property
    def shape(self) -> Tree | None:
        return read_tree(self.tree)

    @property
    def on_data_ranks(self) -> bool:
        return self.shape is None and self.min_confidence is None


@dataclass(frozen=True, slots=True)
class MTP(ModuleMode):
    """The checkpoint's multi-token-prediction (MTP) modules draft.

    k            drafts per step; with a tree its number of nodes, which may be left out
    style        "eagle": the first module, k times; "vanilla": k modules, each with its own KV
    draft_vocab  the part of the vocabulary that is scored; None: all of it
    feed         hidden state that vanilla modules after the first read with a verified token:
                 "chained" takes the previous module's, as DeepSeek-V3 trains modules and
                 transformers runs them; "target" takes the target's, as TensorRT-LLM's vanilla MTP
                 does. The wrong one for a checkpoint costs acceptance, but never changes a token
    tree         tree that an eagle module drafts instead of a chain: a list of paths, each a list
                 of ranks (`draft_trees.py`). [[0], [1], [0, 0], [0, 1]] are the two best tokens,
                 and the two best after the best one. A step then emits up to 1 + depth tokens,
                 still those of plain decoding. Or a `DynamicTree`, which chooses its nodes in each
                 step
    min_confidence  a draft with less confidence is not verified, nor are the drafts after it
                 (`kernels/draft/confidence.py`); None: all are verified. For style="eagle" without
                 a tree
    """

    k: int = _USUAL_DRAFTS
    _: KW_ONLY
    style: Style = "eagle"
    draft_vocab: DraftVocabulary | None = None
    feed: Feed = "chained"
    tree: TreeOption | None = None
    min_confidence: float | None = None

    def __post_init__(self) -> None:
        _keep_tree(self, style=self.style)
        check_drafts(self.k)
        if self.style not in ("eagle", "vanilla"):
            raise ValueError(f"style={self.style!r} must be 'eagle' or 'vanilla'")
        if self.feed not in ("chained", "target"):
            raise ValueError(f"feed={self.feed!r} must be 'chained' or 'target'")
        if self.feed == "target" and self.style != "vanilla":
            raise ValueError(f"feed='target' goes with style='vanilla', not {self.style!r}")
        if not isinstance(self.draft_vocab, DraftVocabulary | None):
            raise ValueError(f"draft_vocab={self.draft_vocab!r} must be a DraftVocabulary or None")
        _check_confidence(self.min_confidence, self.tree, self.style)
        keep_plain_numbers(self)

    @property
    def any_length(self) -> bool:
        return self.shape is None and self.style == "eagle"

    def describe(self) -> str:
        parts = [f"mtp {self.style}, {describe_drafts(self)}"]
        if self.feed == "target":
            parts.append("the target's hidden states")
        if self.draft_vocab is not None:
            parts.append(describe_vocabulary(self.draft_vocab))
        parts += _describe_confidence(self.min_confidence)
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class NGram(Mode):
    """Drafts are the tokens that followed an earlier occurrence of the request's last tokens.

    k      drafts per step
    max_n  most tokens that are looked up; without a match one less, down to one
    """

    k: int = 3
    _: KW_ONLY
    max_n: int = 5

    on_data_ranks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_drafts(self.k)
        if not is_int(self.max_n) or not 1 <= self.max_n <= MAX_NGRAM:
            raise ValueError(f"max_n={self.max_n!r} must be an integer in [1, {MAX_NGRAM}]")
        keep_plain_numbers(self)

    def describe(self) -> str:
        return f"n-gram, k={self.k}, max_n={self.max_n}"


@dataclass(frozen=True, slots=True)
class Suffix(Mode):
    """Drafts are the tokens that followed the longest match of the request's last tokens.

    Matches are found in the request's own text, which begins with the session's earlier turns, or
    in a corpus. The length of the match limits the drafts; without a match nothing is drafted.

    k          most drafts per step
    factor     a match of n tokens supports factor * n drafts, rounded down, as in SuffixDecoding
    max_match  most tokens that are compared
    corpus     a file that is searched for all requests, too: UTF-8 text or, if its name ends in
               `.npy`, token ids, integers [C] as `numpy.save` writes them
    """

    k: int = 7
    _: KW_ONLY
    factor: float = 1.0
    max_match: int = 32
    corpus: PathName | None = None

    def __post_init__(self) -> None:
        check_drafts(self.k)
        if not is_number(self.factor) or not (self.factor > 0 and is_finite(self.factor)):
            raise ValueError(f"factor={self.factor!r} must be a finite number above 0")
        if not is_int(self.max_match) or not 1 <= self.max_match <= MAX_MATCH:
            raise ValueError(f"max_match={self.max_match!r} must be an integer in [1, {MAX_MATCH}]")
        if self.factor * self.max_match < 1:
            raise ValueError(
                f"factor={self.factor} supports no draft of a match of max_match={self.max_match} "
                f"tokens"
            )
        if self.corpus is not None:
            check_path("corpus", self.corpus)
        keep_plain_numbers(self)

    def describe(self) -> str:
        parts = [f"suffix, k={self.k}, factor={self.factor:g}, max_match={self.max_match}"]
        if self.corpus is not None:
            parts.append(f"corpus {os.fspath(self.corpus)}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class DraftModel(Mode):
    """A smaller model with the same tokenizer drafts, with its own KV and in the same graph.

    path  its checkpoint: a directory or a hub id
    k     drafts per step
    min_confidence  see `MTP`
    """

    path: PathName
    k: int = 3
    _: KW_ONLY
    min_confidence: float | None = None

    # After a step it reads only the last two tokens. Its KV of earlier ones comes from its drafts.
    own_drafts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_path("path", self.path)
        check_drafts(self.k)
        _check_confidence(self.min_confidence)
        keep_plain_numbers(self)

    def describe(self) -> str:
        parts = [f"draft model {os.fspath(self.path)}, k={self.k}"]
        return ", ".join(parts + _describe_confidence(self.min_confidence))

    def describe_state(self) -> str:
        return f"draft model, k={self.k}"


@dataclass(frozen=True, slots=True)
class Eagle3(ModuleMode):
    """An EAGLE3 checkpoint drafts: a layer that reads the target's residual stream after a few of
    its layers, with KV of its own.

    path       its checkpoint: a directory or a hub id; "demo": the demo model's
    k          drafts per step
    layers     layers of the target after which its stream is read, in the order of fc's columns;
               None: those that the checkpoint's config names, or else 1, n // 2 - 1 and n - 4 of n.
               Wrong ones cost acceptance, but never change a token
    tree       tree that it drafts instead of a chain; see `MTP`
    min_confidence  see `MTP`
    """

    path: PathName
    k: int = _USUAL_DRAFTS
    _: KW_ONLY
    layers: Sequence[int] | None = None
    tree: TreeOption | None = None
    min_confidence: float | None = None

    # It reads the stream after layers of several stages.
    in_stages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_path("path", self.path)
        _keep_tree(self)
        _check_confidence(self.min_confidence, self.tree)
        check_drafts(self.k)
        if self.layers is not None:
            object.__setattr__(self, "layers", _ids("layers", self.layers, "layer numbers"))
        keep_plain_numbers(self)

    def describe(self) -> str:
        parts = [f"eagle3 {os.fspath(self.path)}, {describe_drafts(self)}"]
        if self.layers is not None:
            parts.append(f"after layers {', '.join(map(str, self.layers))}")
        parts += _describe_confidence(self.min_confidence)
        return ", ".join(parts)

    def describe_state(self) -> str:
        return f"eagle3, {describe_drafts(self)}"


@dataclass(frozen=True, slots=True)
class DFlash(Mode):
    """A DFlash or DSpark checkpoint drafts: a few layers that read the target's residual stream
    after some of its layers, and make a block of drafts in one run.

    path    its checkpoint: a directory or a hub id; "demo": the demo model's
    k       drafts per step, at most those of the block that it is trained for: block_size - 1 for
            z-lab's DFlash, block_size for DeepSpec's checkpoints
    layers  layers of the target after which its stream is read, in the order of fc's columns; None:
            those that the checkpoint's config names. Wrong ones cost acceptance, but never change a
            token
    """

    path: PathName
    k: int = 7
    _: KW_ONLY
    layers: Sequence[int] | None = None

    # It reads the stream after layers of several stages.
    in_stages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_path("path", self.path)
        check_drafts(self.k)
        if self.layers is not None:
            object.__setattr__(self, "layers", _ids("layers", self.layers, "layer numbers"))
        keep_plain_numbers(self)

    def describe(self) -> str:
        parts = [f"dflash {os.fspath(self.path)}, k={self.k}"]
        if self.layers is not None:
            parts.append(f"after layers {', '.join(map(str, self.layers))}")
        return ", ".join(parts)

    def describe_state(self) -> str:
        return f"dflash, k={self.k}"


@dataclass(frozen=True, slots=True)
class UserProvided(Mode):
    """The caller writes up to k drafts a request; nothing is launched ahead (`lookahead` is 0).

    k  most drafts per step

    `engine.draft(request, token_ids)` proposes the tokens after `request.token_ids` as they are at
    the call, and replaces earlier proposals. The first step that decodes the request verifies them.
    Until then they are kept: while the request waits, is prefilled or is paused, and during steps
    for which a gate has switched drafts off. Tokens that arrive meanwhile (the first one, which the
    prompt's last chunk samples, or those of a step that was launched before the call and not read
    yet) replace the drafts at their positions. If one differs from its draft, the drafts after it
    are dropped, too. The counter `drafts/stale` in `engine.stats()` counts all drafts lost in this
    way, or because their request ended first. `Acceptance` leaves out drafts that were fed for
    positions past the request's end.
    """

    k: int = 3

    # Drafts depend on the tokens of the step before.
    lockstep: ClassVar[bool] = True
    own_drafts: ClassVar[bool] = True
    on_data_ranks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_drafts(self.k)
        keep_plain_numbers(self)

    def describe(self) -> str:
        return f"user-provided, k={self.k}"


@dataclass(frozen=True, slots=True)
class SaveHiddenStates(Mode):
    """No drafts: each prompt's hidden states go to a safetensors file, to train a drafter with.

    A request is its prompt alone (`max_tokens` 1). Its file is `{request id:08d}.safetensors`; ids
    begin at 1 in each engine, and a file that is there is replaced.

    directory       where the files go
    layers          auxiliary layers to save besides the last layer's output; None: 1, n // 2 - 1
                    and n - 4 of a model of n layers
    write_interval  prompts between two writes
    """

    directory: PathName
    _: KW_ONLY
    layers: Sequence[int] | None = None
    write_interval: int = 20

    # Hidden states are copied out before those of the next prompt overwrite them.
    lockstep: ClassVar[bool] = True
    packs_prompts: ClassVar[bool] = False
    whole_prompts: ClassVar[bool] = True
    # It reads the stream after layers of several stages.
    in_stages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_path("directory", self.directory)
        check_at_least("write_interval", self.write_interval, 1)
        if self.layers is not None:
            object.__setattr__(self, "layers", _ids("layers", self.layers, "layer numbers"))
        keep_plain_numbers(self)

    @property
    def k(self) -> int:
        return 0

    def describe(self) -> str:
        return f"hidden states to {os.fspath(self.directory)}"

    def layers_of(self, model_layers: int) -> tuple[int, ...]:
        """A model's auxiliary layers, ascending. ValueError unless `model_layers` has them all."""
        if self.layers is None:
            usual = {1, model_layers // 2 - 1, model_layers - 4}
            return tuple(sorted(layer for layer in usual if 0 <= layer < model_layers))
        beyond = [layer for layer in self.layers if layer >= model_layers]
        if beyond:
            raise ValueError(f"layers={self.layers}: the model has layers 0 to {model_layers - 1}")
        return tuple(sorted(self.layers))


@dataclass(frozen=True, slots=True)
class Auto:
    """N-gram drafts of a length that follows from max_batch; see `resolve_auto`."""


Speculative = Mode | Auto

MODES: tuple[type[Mode], ...] = (
    MTP,
    NGram,
    Suffix,
    DraftModel,
    Eagle3,
    DFlash,
    JumpForward,
    UserProvided,
    SaveHiddenStates,
)
"""All modes; `graphengine.drafters` makes a drafter for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RelaxedAcceptance:
    """While a greedy request thinks, also accept drafts that are not the most probable token.

    topk             a draft must be among this many most probable tokens
    delta            and its probability at most this much below that of the most probable one
    begin_token_ids  each of these tokens begins a thinking phase
    end_token_ids    each of these ends it
    """

    topk: int = 10
    delta: float = 0.6
    begin_token_ids: Sequence[int]
    end_token_ids: Sequence[int]

    def __post_init__(self) -> None:
        check_at_least("topk", self.topk, 1)
        if not is_number(self.delta) or not 0.0 <= self.delta <= 1.0:
            raise ValueError(f"delta={self.delta!r} must be a number in [0, 1]")
        for name in ("begin_token_ids", "end_token_ids"):
            ids = _ids(name, getattr(self, name), "token ids")
            if not ids:
                raise ValueError(f"{name} must name at least one token")
            object.__setattr__(self, name, ids)
        both = sorted({*self.begin_token_ids} & {*self.end_token_ids})
        if both:
            raise ValueError(f"tokens {both} are among both begin_token_ids and end_token_ids")
        keep_plain_numbers(self)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError unless the vocabulary has all the tokens."""
        for name in ("begin_token_ids", "end_token_ids"):
            ids = getattr(self, name)
            if max(ids) >= vocab_size:
                raise ValueError(f"{name}={ids} exceed the vocabulary of {vocab_size} tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class GateOptions:
    """When to stop speculating and when to resume; `graphengine.host.gate` has the exact rule.

    window       records that it takes to judge a draft length
    off_below    a draft length is given up below this mean number of accepted drafts per step
    on_above     a length on trial is kept above this mean number of accepted drafts per step
    probe_every  steps after which a longer length is tried
    max_live     with more live rows than this nothing is drafted; None: no limit
    """

    window: int = 64
    off_below: float = 0.3
    on_above: float = 0.5
    probe_every: int = 512
    max_live: int | None = None

    def __post_init__(self) -> None:
        check_at_least("window", self.window, 1)
        check_at_least("probe_every", self.probe_every, 1)
        for name in ("off_below", "on_above"):
            value = getattr(self, name)
            if not is_number(value) or not (value >= 0 and is_finite(value)):
                raise ValueError(f"{name}={value!r} must be a finite number from 0 up")
        if self.off_below > self.on_above:
            raise ValueError(f"off_below={self.off_below} exceeds on_above={self.on_above}")
        if self.max_live is not None:
            check_at_least("max_live", self.max_live, 1)
        keep_plain_numbers(self)


def check_rows(rows: int, k: int, max_live: int | None = None) -> None:
    """Raise ValueError unless the kernels hold `rows` rows of `k` drafts and a token each.

    max_live  the gate's limit, if there is a gate; `rows` is then the bucket that serves that many
    """
    lanes = rows * (k + 1)
    if lanes > MAX_LANES:
        fitting, shorter = MAX_LANES // (k + 1), MAX_LANES // rows - 1
        bucket = "" if max_live is None else f" (the bucket that serves max_live={max_live})"
        raise ValueError(
            f"{rows} rows{bucket} with k={k} drafts feed {lanes} tokens a step, and at most "
            f"{MAX_LANES} fit: max_batch={fitting} does with k={k}, or a larger one with a bucket "
            f"of at most {fitting} rows and a gate whose max_live it serves"
            + (f"; k={shorter} does with {rows} rows" if shorter > 0 else "")
        )


def check_speculative(speculative: object) -> None:
    """Raise ValueError unless it is the options of a mode, or None."""
    if speculative is not None and not isinstance(speculative, Mode | Auto):
        names = ", ".join(mode.__name__ for mode in (*MODES, Auto))
        raise ValueError(f"speculative={speculative!r} must be one of {names}, or None")


def resolve_auto(max_batch: int) -> NGram:
    """The mode that `Auto` stands for: longer drafts where few rows share a step.

    It goes with a gate that stops drafting above `AUTO_MAX_LIVE` live rows, or above as many as fit
    the kernels.
    """
    return NGram(k=5, max_n=3) if max_batch <= 4 else NGram(k=3, max_n=5)


def forced_acceptance(
    configured: int | None, environ: Mapping[str, str] = os.environ
) -> int | None:
    """Number of drafts that every row accepts, whatever the target samples; None: the target
    decides.

    A row with fewer drafts accepts all of them.

    `GRAPHENGINE_FORCE_ACCEPTED`, if set, overrides the configured number. Forcing serves to measure
    what a step costs: the text is nonsense, and a warning says so. 0 forces too, unlike None.
    ValueError for anything but integers from 0 up.
    """
    forced, origin = configured, "forced_acceptance"
    text = environ.get(FORCE_ACCEPTED)
    if text is not None:
        # isdecimal alone would accept the digits of all scripts.
        if not (text.isascii() and text.isdecimal()):
            raise ValueError(f"{FORCE_ACCEPTED}={text!r} must be an integer from 0 up, or unset")
        forced, origin = int(text), FORCE_ACCEPTED
    if forced is None:
        return None
    if not is_int(forced) or forced < 0:
        raise ValueError(f"{origin}={forced!r} must be an integer from 0 up, or None")
    log.warning(
        "%s=%d: EVERY STEP ACCEPTS THAT MANY DRAFTS, RIGHT OR WRONG. The text is nonsense; "
        "this is for measuring speed alone.",
        origin,
        forced,
    )
    # No row has more drafts.
    return min(int(forced), MAX_DRAFTS)


def describe(speculative: Speculative | None) -> str:
    """One line for reports: "mtp eagle, k=3", "off"."""
    match speculative:
        case None:
            return "off"
        case Auto():
            return "auto"
        case mode:
            return mode.describe()


def _keep_tree(mode: ModuleMode, style: Style = "eagle") -> None:
    """Set the options that follow from a tree, where there is one. ValueError for options without
    trees.
    """
    tree = mode.shape
    if tree is None:
        return
    check_tree(tree, mode.k, usual=_USUAL_DRAFTS, style=style)
    object.__setattr__(mode, "k", tree.nodes)
    if isinstance(tree, StaticTree):
        object.__setattr__(mode, "tree", tree.paths)


def describe_drafts(mode: ModuleMode) -> str:
    """Text for reports: the number of drafts, such as "k=3", or the shape of their tree."""
    tree = mode.shape
    return f"k={mode.k}" if tree is None else tree.describe()


def _describe_confidence(least: float | None) -> list[str]:
    return [] if least is None else [f"confidence from {least:g}"]


def _check_confidence(least: object, tree: object = None, style: str = "eagle") -> None:
    if least is None:
        return
    if not is_number(least) or not 0 < least <= 1:
        raise ValueError(f"min_confidence={least!r} must be a number in (0, 1], or None")
    if style != "eagle" or tree is not None:
        raise ValueError(
            f"min_confidence={least} goes with style='eagle' and without a tree, not with "
            f"style={style!r}, tree={tree!r}"
        )


def _ids(name: str, value: Any, meaning: str) -> tuple[int, ...]:
    """The ids as a tuple, in their order: the caller may change the list later."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError(f"{name}={value!r} must be a list of {meaning}")
    for item in value:
        if not is_int(item) or not 0 <= item <= INT32_MAX:
            raise ValueError(f"{name} holds {item!r}, which is none of {meaning}")
    if len(set(value)) < len(value):
        raise ValueError(f"{name}={tuple(value)} repeats itself")
    return tuple(map(int, value))
