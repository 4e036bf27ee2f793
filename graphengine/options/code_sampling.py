"""How the codes of a frame after the first are drawn: `SamplingParams(codes=CodeSampling(...))`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from graphengine.options.checks import INT32_MAX, is_int, is_number, shown
from graphengine.options.table import Bound, within

FLOAT32_MAX = 3.4028234e38
# Below it the quotients leave float32's range, and different tokens tie.
MIN_TEMPERATURE = 1e-6
TEMPERATURE = Bound(
    f"be 0, or in [{MIN_TEMPERATURE}, {FLOAT32_MAX}]",
    lambda value: value == 0 or MIN_TEMPERATURE <= value <= FLOAT32_MAX,
)
TOP_K = Bound(
    f"be in [1, {INT32_MAX}], or 0 or -1 for all tokens",
    lambda value: -1 <= value <= INT32_MAX,
)
TOP_P = within(0, 1)
_BOUNDS = {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P}


class DrawnCode(NamedTuple):
    """The options by which one code is drawn; `top_k` is 0 where all codes are kept."""

    temperature: float
    top_k: int
    top_p: float

    @property
    def filtered(self) -> bool:
        """Whether a filter can leave a code out of a draw."""
        return self.temperature > 0 and (self.top_k != 0 or self.top_p != 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeSampling:
    """Sampling of the codes of a frame after the first, of a model whose steps emit frames.

        SamplingParams(temperature=0.9, codes=CodeSampling(temperature=0.6, top_k=50))

    Each option is one number for all of these codes, or a sequence with a number for each; None:
    the request's own option of that name, which its first code has. They mean what they mean in
    `SamplingParams`. ValueError, with the value, for one that cannot be.

    temperature  0 is greedy
    top_k        keep the k most probable codes; 0 or -1 keeps all
    top_p        keep the shortest prefix of the codes, most probable first, that sums to top_p
    """

    temperature: float | Sequence[float] | None = None
    top_k: int | Sequence[int] | None = None
    top_p: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if isinstance(given, Sequence) and not isinstance(given, str | bytes):
                numbers = tuple(_checked(field.name, each) for each in given)
                object.__setattr__(self, field.name, numbers)
            elif given is not None:
                object.__setattr__(self, field.name, _checked(field.name, given))

    def drawn(self, count: int, usual: DrawnCode) -> tuple[DrawnCode, ...]:
        """The options of each of `count` codes; `usual` has the request's own.

        ValueError, with both numbers, for a sequence of another length.
        """
        columns = []
        for name, own in usual._asdict().items():
            given = getattr(self, name)
            if isinstance(given, tuple) and len(given) != count:
                raise ValueError(
                    f"codes: {name} has {len(given)} numbers, and a frame has {count} codes after "
                    f"its first"
                )
            numbers = given if isinstance(given, tuple) else (own if given is None else given,)
            columns.append(numbers if isinstance(given, tuple) else numbers * count)
        return tuple(DrawnCode(t, max(k, 0), p) for t, k, p in zip(*columns, strict=True))


def _checked(name: str, value: Any) -> Any:
    """A number as Python's own type; ValueError for anything else, and out of bounds."""
    whole, bound = name == "top_k", _BOUNDS[name]
    if not (is_int(value) if whole else is_number(value)):
        raise ValueError(
            f"codes: {name}={shown(value)} must be {'an integer' if whole else 'a number'}, a "
            f"sequence of them or None"
        )
    if not bound.holds(value):
        raise ValueError(f"codes: {name}={shown(value)} must {bound.must}")
    return int(value) if whole else float(value)
