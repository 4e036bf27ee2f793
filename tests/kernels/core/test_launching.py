"""Launches that only compile: what is looked up, by whom, how it fails, and what is left behind."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime._async_compile import active_mode

from graphengine.kernels.core import launching
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import compile_kernels, launcher, take_counters
from graphengine.kernels.core.triton_versions import OPTIONS
from graphengine.kernels.norm_rope import activation
from graphengine.kernels.norm_rope.activation import swiglu

KERNELS = Path(__file__).resolve().parents[3] / "kernels"
# Seconds: only a test that has hung waits for so long.
HUNG = 600
of_sources = pytest.mark.skipif(INTERPRETED, reason="an ordinary process sees the same")


# From triton 3.9 on a kernel also says how a failed compilation is forgotten.
SUBMITTED = inspect.signature(triton.AsyncCompileMode.submit).parameters
FORGETTING = [lambda kernel: None] if "cleanup_fn" in SUBMITTED else []


class StandIn:
    """Stands in for a jitted function; `compile` runs in a thread, where Triton would compile."""

    __name__ = "stand_in"

    def __init__(
        self, compile: Callable[[], Any] | None = None, *, in_memory: bool = False
    ) -> None:
        self.compile = compile or (lambda: "binary")
        self.in_memory = in_memory
        self.runs: list[Any] = []
        self.look_ups: list[Any] = []
        self.kept: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.runs.append((grid, args, options))

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        self.look_ups.append((grid, args, options))
        if self.in_memory:
            return "kernel"
        mode = active_mode.get()
        assert mode is not None
        return mode.submit(self, self.compile, self.kept.append, *FORGETTING)


@pytest.fixture(autouse=True)
def _compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the interpreter as well; and whatever a test does, nothing of a pass is left behind."""
    monkeypatch.setattr(launching, "INTERPRETED", False)
    knobs = triton.knobs.compilation
    before = threading.enumerate(), knobs.listener, list(warnings.filters)
    yield
    assert (threading.enumerate(), knobs.listener, list(warnings.filters)) == before
    assert active_mode.get() is None and launching._instead.get() is None


def launching_step(kernel: Any, *args: Any, **options: Any) -> Callable[[], None]:
    def step() -> None:
        launcher(kernel, (2, 3))(*args, **options)

    return step


def test_a_launch_is_the_kernels_own() -> None:
    kernel = StandIn()
    launcher(kernel, (4,))(1, x=2)
    assert kernel.runs == [((4,), (1,), {"x": 2} | OPTIONS)] and not kernel.look_ups


def test_a_step_that_is_compiled_launches_nothing() -> None:
    kernel, known = StandIn(), StandIn(in_memory=True)
    tensor = torch.zeros(1)
    done = compile_kernels(
        {"a": launching_step(kernel, tensor, N=1), "b": launching_step(known, tensor)}
    )
    assert kernel.look_ups == [((2, 3), (tensor,), {"N": 1} | OPTIONS)]
    assert known.look_ups == [((2, 3), (tensor,), OPTIONS)]
    assert not kernel.runs and not known.runs
    assert kernel.kept == ["binary"] and not known.kept
    # No listener said that it was compiled; what was in memory counts nowhere.
    assert (done.compiled, done.loaded) == (0, 1) and done.seconds > 0


def test_a_kernel_is_compiled_once_and_kept_as_soon_as_it_is_there() -> None:
    compiled = threading.Event()

    def compile() -> str:
        compiled.set()
        return "binary"

    kernel = StandIn(compile)

    def step() -> None:
        launcher(kernel, (1,))(0)
        assert compiled.wait(HUNG)
        while not kernel.kept:
            launcher(kernel, (1,))(0)

    assert compile_kernels({"a": step, "b": launching_step(kernel)}).loaded == 1
    assert kernel.kept == ["binary"]


def test_kernels_compile_side_by_side() -> None:
    together = threading.Barrier(3, timeout=HUNG)
    kernels = [StandIn(lambda: together.wait()) for _ in range(3)]
    steps = {str(index): launching_step(kernel) for index, kernel in enumerate(kernels)}
    assert compile_kernels(steps, workers=3).loaded == 3
    assert all(kernel.kept for kernel in kernels)


def test_what_was_compiled_is_counted_and_its_launcher_built_once_a_signature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[tuple[Any, str]] = []
    active = SimpleNamespace(launcher_cls=lambda source, metadata: built.append((source, metadata)))
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=active))
    heard: list[bool] = []

    def new(on_disk: bool, *types: str) -> StandIn:
        source = SimpleNamespace(signature=dict(enumerate(types)))

        def compile() -> Any:
            listener = triton.knobs.compilation.listener
            assert listener is not None
            listener(src=source, metadata={}, metadata_group={}, times=None, cache_hit=on_disk)
            return SimpleNamespace(src=source, metadata="metadata")

        return StandIn(compile)

    kernels = [new(False, "i32"), new(False, "i32"), new(False, "*fp32"), new(True, "i64")]
    steps = {str(index): launching_step(kernel) for index, kernel in enumerate(kernels)}
    with monkeypatch.context() as patched:
        knobs = triton.knobs.compilation
        patched.setattr(knobs, "listener", lambda cache_hit, **_: heard.append(cache_hit))
        done = compile_kernels(steps, workers=2)
    assert (done.compiled, done.loaded) == (3, 1)
    assert sorted(source.signature[0] for source, _ in built) == ["*fp32", "i32"]
    assert sorted(heard) == [False, False, False, True], "the listener before hears all of it"


def test_other_threads_launch_as_ever() -> None:
    kernel = StandIn(in_memory=True)

    def step() -> None:
        launcher(kernel, (1,))("compiled")
        other = threading.Thread(target=lambda: launcher(kernel, (1,))("launched"))
        other.start()
        other.join()

    compile_kernels({"a": step})
    assert [args for _, args, _ in kernel.look_ups] == [("compiled",)]
    assert [args for _, args, _ in kernel.runs] == [("launched",)]


def test_a_program_that_compiles_by_itself_may_open_engines() -> None:
    """Triton allows one mode of its own in a context."""
    pool = launching._Compilers(1)
    with pool, triton.AsyncCompileMode(pool):
        assert compile_kernels({"a": launching_step(StandIn())}).loaded == 1


def test_a_kernel_that_does_not_compile_is_named() -> None:
    def fail() -> Any:
        raise ValueError("no such instruction")

    kernel, other = StandIn(fail), StandIn()
    steps = {"decode/2": launching_step(other), "decode/1": launching_step(kernel)}
    message = "kernel stand_in of step 'decode/1' failed: no such instruction"
    with pytest.raises(RuntimeError, match=message) as caught:
        compile_kernels(steps)
    assert isinstance(caught.value.__cause__, ValueError)
    # Nothing of it is in the way of the next one.
    assert compile_kernels({"decode/2": launching_step(other)}).loaded == 1


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_step_that_raises_begins_no_further_compilation(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    begun, go = threading.Event(), threading.Event()

    def compile_slowly() -> str:
        begun.set()
        assert go.wait(HUNG)
        return "binary"

    slow, waiting = StandIn(compile_slowly), StandIn()

    def step() -> None:
        launcher(slow, (1,))()
        launcher(waiting, (1,))()
        assert begun.wait(HUNG)
        raise kind("out of memory")

    cancel = launching._UncompiledKernels.cancel

    def cancel_and_go_on(found: Any) -> None:
        cancel(found)
        go.set()

    monkeypatch.setattr(launching._UncompiledKernels, "cancel", cancel_and_go_on)

    expected = RuntimeError if kind is ValueError else kind
    with pytest.raises(expected, match="out of memory") as caught:
        compile_kernels({"prefill/8": step}, workers=1)
    if kind is ValueError:
        assert "compilation for step 'prefill/8' failed" in str(caught.value)
    assert not waiting.kept


@pytest.mark.parametrize("workers", [0, -1])
def test_no_worker_is_refused(workers: int) -> None:
    with pytest.raises(ValueError, match=f"workers={workers} must be 1 or more, or None"):
        compile_kernels({}, workers=workers)


def test_a_listener_that_somebody_sets_meanwhile_stays() -> None:
    def other(**found: Any) -> None: ...

    knobs = triton.knobs.compilation
    before = knobs.listener
    compile_kernels({"a": lambda: setattr(knobs, "listener", other)})
    assert knobs.listener is other
    knobs.listener = before


def test_a_pass_inside_a_pass_ends() -> None:
    kernel = StandIn()

    def step() -> None:
        compile_kernels({"b": launching_step(kernel)})

    compile_kernels({"a": step})
    assert kernel.kept == ["binary"]


@of_sources
def test_the_pass_does_not_import_torchs_compiler() -> None:
    """It takes seconds, more than all kernels from the cache."""
    code = (
        "import sys, torch\n"
        "from graphengine.kernels.core import launching\n"
        "with launching.ZeroedMemory():\n"
        "    assert not torch.empty(9999).any()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_torch_finds_zeros_where_a_kernel_would_have_written() -> None:
    table, found = torch.arange(5.0), {}

    def step() -> None:
        like = torch.ones(3, dtype=torch.int32)
        made = {
            "empty": torch.empty(3, dtype=torch.int32),
            "like": torch.empty_like(like),
            "new": like.new_empty(3),
            "strided": torch.empty_strided((3,), (1,), dtype=torch.int32),
        }
        found.update({name: table.index_select(0, index) for name, index in made.items()})

    compile_kernels({"a": step})
    assert found.keys() == {"empty", "like", "new", "strided"}
    assert all(torch.equal(values, torch.zeros(3)) for values in found.values())


# Of Triton's own kernels.

needs_no_gpu = pytest.mark.skipif(
    INTERPRETED or torch.cuda.is_available(), reason="compiles for a GPU that is not there"
)


@triton.jit
def _wrong_kernel(x_ptr, SIZE: triton.language.constexpr):
    triton.language.static_assert(SIZE < 4, "four is too many")
    triton.language.store(x_ptr, 0)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Triton compiles for sm_90 and keeps what it compiles in a new folder."""
    device = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=lambda source, metadata: None,
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(activation, "use_triton", lambda x: True)
    monkeypatch.setattr(driver, "_active", device)
    yield
    for kernel in (activation._swiglu_kernel, _wrong_kernel):
        kernel.device_caches.clear()


@needs_no_gpu
def test_real_kernels_are_compiled_then_in_memory_then_on_disk(hopper: None) -> None:
    def step() -> None:
        for dtype in (torch.float32, torch.bfloat16):
            x, slot = torch.zeros(2, 64, dtype=dtype), torch.zeros(2, dtype=torch.int32)
            assert not swiglu(x, slot).any()

    def counts() -> tuple[int, int]:
        done = compile_kernels({"a": step, "b": step})
        return done.compiled, done.loaded

    assert [counts(), counts()] == [(2, 0), (0, 0)]
    activation._swiglu_kernel.device_caches.clear()
    assert [counts(), counts()] == [(0, 2), (0, 0)]


@pytest.mark.parametrize("times", [1, 8])
def test_parsers_that_disturb_each_other_begin_again(times: int) -> None:
    """CPython's `ast.parse` may fail in threads; Triton raises its own error with that as cause."""
    tried: list[int] = []

    def compile_kernel(kernel: Any) -> Any:
        tried.append(1)
        if len(tried) <= times:
            try:
                raise SystemError("AST constructor recursion depth mismatch (before=87, after=106)")
            except SystemError as cause:
                raise RuntimeError("at 13:4") from cause
        return kernel

    with launching._Compilers(1) as compilers:
        assert compilers.submit(compile_kernel, "kernel").result() == "kernel"
    assert len(tried) == times + 1


def test_other_errors_of_the_interpreter_are_raised_at_once() -> None:
    tried: list[int] = []

    def compile_kernel() -> Any:
        tried.append(1)
        raise SystemError("unknown opcode")

    with launching._Compilers(1) as compilers, pytest.raises(SystemError, match="unknown opcode"):
        compilers.submit(compile_kernel).result()
    assert tried == [1]


@needs_no_gpu
def test_a_real_kernel_that_does_not_compile_is_named(hopper: None) -> None:
    step = launching_step(_wrong_kernel, torch.zeros(1), SIZE=4)
    with pytest.raises(RuntimeError, match=r"kernel _wrong_kernel of step 'a' failed") as caught:
        compile_kernels({"a": step})
    assert "four is too many" in str(caught.value)
    assert compile_kernels({"a": launching_step(_wrong_kernel, torch.zeros(1), SIZE=3)}).compiled


# The kernels' sources.


def jitted(tree: ast.AST) -> set[str]:
    """Names of the functions that `triton.jit` or `gluon.jit` decorates."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def bare_launches(tree: ast.AST, kernels: set[str]) -> list[int]:
    """Lines of `kernel[grid](...)`, which `compile_kernels` does not see."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and ast.unparse(node.func.value).split(".")[-1] in kernels
    ]


def launched(tree: ast.AST) -> set[str]:
    """Names of the kernels that are given to `launcher`."""
    return {
        ast.unparse(node.args[0]).split(".")[-1]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "launcher"
    }


@of_sources
def test_every_launch_can_be_compiled_only() -> None:
    trees = {str(path): ast.parse(path.read_text()) for path in KERNELS.rglob("*.py")}
    kernels = set().union(*map(jitted, trees.values()))
    bare = {name: bare_launches(tree, kernels) for name, tree in trees.items()}
    assert not any(bare.values()), bare
    through = set().union(*map(launched, trees.values()))
    assert len(through) > 30 and through <= kernels
    planted = ast.parse("_swiglu_kernel[(1,)](x)\nlinear_gluon.dot_kernel[grid](x)\nlines[0](x)")
    assert bare_launches(planted, kernels) == [1, 2]


# Locals of the function that triton makes around a kernel: an argument of that name is lost.
TAKEN = {"params", "specialization", "options"}


def taken_names(tree: ast.AST) -> list[str]:
    """Arguments of kernels, "kernel.argument", whose names triton takes for itself."""
    kernels = jitted(tree)
    return [
        f"{node.name}.{argument.arg}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in kernels
        for argument in node.args.args
        if argument.arg in TAKEN
    ]


@of_sources
def test_no_argument_has_a_name_that_triton_takes() -> None:
    """Natively it is another object then; a compiled or interpreted kernel does not show it."""
    trees = [ast.parse(path.read_text()) for path in KERNELS.rglob("*.py")]
    assert not [name for tree in trees for name in taken_names(tree)]
    planted = "@triton.jit\ndef kernel(x_ptr, params): pass\ndef wrapper(params): pass"
    assert taken_names(ast.parse(planted)) == ["kernel.params"]
    generated = inspect.getsource(triton.runtime.jit.create_function_from_signature)
    assert all(name in generated for name in TAKEN)


@of_sources
@pytest.mark.parametrize(
    ("arrivals", "found"),
    [
        (None, "None"),
        (torch.zeros(131, dtype=torch.int32), r"torch.int32 \[131\]"),
        (torch.zeros(132), r"torch.float32 \[132\]"),
        (torch.zeros(300, dtype=torch.int32)[::2], r"torch.int32 \[150\]"),
    ],
)
def test_counters_that_do_not_fit_are_refused(arrivals: torch.Tensor | None, found: str) -> None:
    with pytest.raises(ValueError, match=f"attention wants 132 dense int32 arrivals, not {found}"):
        take_counters(arrivals, 132, "attention")


@of_sources
def test_counters_are_the_first_of_those_that_launches_share() -> None:
    arrivals = torch.zeros(300, dtype=torch.int32)
    taken = take_counters(arrivals, 132, "attention")
    assert len(taken) == 132 and taken.data_ptr() == arrivals.data_ptr()
