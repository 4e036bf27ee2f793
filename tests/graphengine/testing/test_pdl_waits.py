"""assert_pdl_waits: what PTX, SASS and cubins tell of waits; the compiler needs no GPU."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra.cuda import gdc_wait

from graphengine.testing import GraphCheckError, assert_pdl_waits
from graphengine.testing.machine_code import KernelCode, read_code
from planted.graphs import chain, nested, with_full_edge


@triton.jit
def careful(x, y, live, N: tl.constexpr):
    gdc_wait()
    if tl.program_id(0) < tl.load(live):
        place = tl.arange(0, N)
        tl.store(y + place, tl.load(x + place) + 1)


@triton.jit
def leaves_early(x, y, live, N: tl.constexpr):
    if tl.program_id(0) < tl.load(live):
        gdc_wait()
        place = tl.arange(0, N)
        tl.store(y + place, tl.load(x + place) + 1)


@triton.jit
def writes_early(x, y, live, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.atomic_add(live, 1)
    gdc_wait()
    tl.store(y + place, tl.load(x + place) + 1)


@triton.jit
def waits_in_a_loop(x, y, live, N: tl.constexpr):
    gdc_wait()
    for _ in range(tl.load(live)):
        place = tl.arange(0, N)
        tl.store(y + place, tl.load(x + place) + 1)


def compiled(kernel: Any) -> Any:
    signature = {"x": "*fp32", "y": "*fp32", "live": "*i32", "N": "constexpr"}
    source = ASTSource(kernel, signature, {"N": 128})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.mark.parametrize("form", ["ptx", "cubin"])
@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (careful, None),
        (waits_in_a_loop, None),
        (leaves_early, r"may end at line \d+ \((ret|EXIT)\) before it has waited; it has 1 waits"),
        (writes_early, r"writes at line \d+ \((atom|red|RED|ATOM).*\) before it has waited"),
    ],
)
def test_a_compiled_kernel_tells_where_it_does_not_wait(
    kernel: Any, fault: str | None, form: str
) -> None:
    (found,) = read_code(compiled(kernel).asm[form])
    assert found.name == kernel.__name__
    if fault is None:
        assert found.fault is None
    else:
        assert re.match(fault, found.fault or "")


def test_a_compiled_kernel_is_read_by_its_ptx() -> None:
    """A launch of Triton returns it with the driver's handle once it is loaded."""
    kernel = compiled(careful)
    assert read_code(SimpleNamespace(asm=kernel.asm, function=7)) == [
        KernelCode(name="careful", fault=None, function=7)
    ]
    assert read_code(SimpleNamespace(asm=kernel.asm, function=None))[0].function == 0


WAITING = ".visible .entry {name}()\n{{\n  griddepcontrol.wait;\n  ret;\n}}\n"
NOT_WAITING = ".visible .entry {name}()\n{{\n  ret;\n}}\n"


def ptx(*names: str, but: str = "") -> str:
    return "".join((NOT_WAITING if n == but else WAITING).format(name=n) for n in names)


NAMES = ("begin", "norm", "linear", "attention", "finish")


def test_only_programmatic_edges_count() -> None:
    code = [ptx(*NAMES, but="norm")]
    with pytest.raises(GraphCheckError, match=r"1 of 5 .*: 0 \(begin\) -> 1 \(norm\): it may end"):
        assert_pdl_waits(chain(), code)
    assert_pdl_waits(with_full_edge(chain(), 0), code)
    assert_pdl_waits(chain(), [ptx(*NAMES, but="begin")])  # no edge leads there


def test_nested_graphs_are_read() -> None:
    with pytest.raises(GraphCheckError, match=r"1/0/0 \(begin\) -> 1/0/1 \(norm\)"):
        assert_pdl_waits(nested(chain()), [ptx(*NAMES, but="norm")])


def test_kernels_without_code_are_an_error_unless_that_is_meant() -> None:
    message = r"whether 2 kernels wait cannot be told, .* has 4 kernels and not these: 2 \(linear\)"
    known = [ptx(*(name for name in NAMES if name != "linear"))]
    with pytest.raises(GraphCheckError, match=message):
        assert_pdl_waits(chain(), known)
    assert_pdl_waits(chain(), known, unknown=True)


def test_every_variant_of_a_name_has_to_wait() -> None:
    with pytest.raises(GraphCheckError, match=r"0 \(begin\) -> 1 \(norm\)"):
        assert_pdl_waits(chain(), [ptx(*NAMES), ptx("norm", but="norm")])


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("griddepcontrol.wait; st.global.b32 [%rd1], 0; ret;", None),
        ("st.shared.b32 [%r1], 0; griddepcontrol.wait; ret;", None),
        ("@%p1 trap; griddepcontrol.wait; ret;", None),
        ("@%p1 griddepcontrol.wait; ret;", "may end"),
        ("@%p1 ret; griddepcontrol.wait; ret;", "may end"),
        ("st.volatile.global.b32 [%rd1], 0; griddepcontrol.wait; ret;", "writes"),
        ("cp.async.bulk.tensor.2d.global.shared::cta [%rd1], [%r1]; ret;", "writes"),
        ("$L: @%p1 bra $L; griddepcontrol.wait; ret;", None),
        ("@%p1 bra $L; griddepcontrol.wait;\n$L: ret;", "may end"),
        ("bra.uni $L;\n$K: ret;\n$L: griddepcontrol.wait; bra.uni $K;", None),
    ],
)
def test_paths_through_ptx(body: str, fault: str | None) -> None:
    (found,) = read_code(f".visible .entry f()\n{{\n{body}\n}}\n")
    assert found.fault is None if fault is None else (found.fault or "").startswith(fault)


def test_what_is_no_code_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel in 5 characters of PTX or SASS"):
        assert_pdl_waits(chain(), ["hello"])
    with pytest.raises(ValueError, match="7 is of type int: give PTX, a cubin, or the compiled"):
        assert_pdl_waits(chain(), [7])
    with pytest.raises(ValueError, match="nvdisasm cannot read 3 bytes"):
        assert_pdl_waits(chain(), [b"abc"])


def test_a_missing_disassembler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="reading a cubin needs nvdisasm, of the CUDA toolkit"):
        read_code(b"abc")
