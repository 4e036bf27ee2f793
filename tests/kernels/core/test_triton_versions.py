"""What depends on the version of Triton, but for its names: those every other test uses."""

from __future__ import annotations

import warnings

import pytest
import triton

from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.triton_versions import NEWEST, bits_of_triton, warn_if_untried


def test_a_version_that_was_never_tried_is_named() -> None:
    with pytest.warns(UserWarning, match=rf"triton 3\.10\.1 is newer than {NEWEST}, the newest"):
        warn_if_untried("3.10.1")


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.0+git5", None])
def test_a_version_that_was_tried_gives_no_warning(version: str | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untried(version)


def test_bits_depend_on_triton_where_it_compiles() -> None:
    major, minor, *_ = triton.__version__.split(".")
    assert bits_of_triton("cuda") == {"triton": f"{major}.{minor}"}
    assert bits_of_triton("cpu") == {}


def test_every_launch_asks_for_one_rounding_of_a_product_and_a_sum() -> None:
    """Which versions do by default changes."""
    asked: list[dict[str, object]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda **options: asked.append(options)

    launcher(Kernel(), (1,))()
    assert asked == [{"enable_fp_fusion": True}]
