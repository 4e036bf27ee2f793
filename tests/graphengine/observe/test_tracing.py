"""NVTX ranges: which there are, what they carry, what they cost where nobody looks.

A stand-in for NVTX's domain shows what the engine does; a small tool in C, attached to a process of
its own as a profiler is, shows what arrives after the nvtx package.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from engines.named_graphs import graph_names, replace_graph
from engines.small_engine import LONG, PROMPT, greedy, open_engine, run
from graphengine import Engine
from graphengine.core import engine_core as core
from graphengine.core import runtime
from graphengine.core.engine_core import EngineCore
from graphengine.observe import tracing
from graphengine.observe.tracing import NOTHING, Tracer, unpack
from graphengine.opening import loading as opening
from graphengine.profiles.benchmark import engines as profile_engines

STEPS = ("step/plan", "step/load", "step/replay", "step/collect")
STEP_METHODS = ("plan", "load", "replay", "collect")


class Domain:
    """Keeps every range as (depth, name, category, rows, live), as they begin."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, str, str, int, int]] = []
        self.made: Counter[tuple[str, int]] = Counter()
        self.open = 0

    def get_event_attributes(self, *, message: str, color: int, category: str, payload: int) -> Any:
        self.made[message, payload] += 1
        return message, category, *unpack(payload)

    def push_range(self, attributes: Any) -> None:
        self.ranges.append((self.open, *attributes))
        self.open += 1

    def pop_range(self) -> None:
        self.open -= 1
        assert self.open >= 0

    def take(self) -> list[tuple[int, str, str, int, int]]:
        ranges, self.ranges = self.ranges, []
        return ranges


@pytest.fixture
def domain(monkeypatch: pytest.MonkeyPatch) -> Domain:
    """What the engine's ranges go to in this test."""
    domain = Domain()
    tracer = Tracer(domain)
    for module in (core, opening, runtime, profile_engines):
        monkeypatch.setattr(module, "span", tracer.span)
    for name in STEP_METHODS:
        monkeypatch.setattr(EngineCore, name, getattr(EngineCore, name).traced_by(tracer))
    return domain


def test_a_start_shows_the_weights_and_every_capture(domain: Domain) -> None:
    with open_engine(device="cpu", max_batch=2) as engine:
        ranges = domain.take()
        assert ranges[0] == (0, "load", "load", 0, 0)
        captured = [name for _, name, category, *_ in ranges if category == "capture"]
        assert captured == [f"capture/{name}" for name in graph_names(engine)]
        # The captured code holds no range: a replay runs none of it.
        assert len(ranges) == 1 + len(captured) and domain.open == 0


def test_a_step_is_four_ranges_with_bucket_and_live_rows(domain: Domain) -> None:
    with open_engine(device="cpu", max_batch=4, buckets=(1, 4), lookahead=0) as engine:
        requests = [engine.submit(prompt, greedy()) for prompt in (PROMPT, LONG, PROMPT)]
        while not all(len(request.token_ids) >= 2 for request in requests):
            engine.step()
        domain.take()
        engine.step()
        assert domain.take() == [
            (0, "step/plan", "step", 0, 3),
            (0, "step/load", "step", 4, 3),
            (0, "step/replay", "step", 4, 3),
            (0, "step/collect", "step", 4, 3),
        ]
        run(engine)
        # One look at an engine with nothing to do.
        domain.take()
        engine.step()
        assert domain.take() == [(0, "step/plan", "step", 0, 0)]


def test_a_prefill_is_a_range_of_its_own_inside_the_replay(domain: Domain) -> None:
    with open_engine(device="cpu", lookahead=0) as engine:
        engine.submit(list(range(40)), greedy())
        domain.take()
        engine.step()
        assert domain.take() == [
            (0, "step/plan", "step", 0, 0),
            (0, "step/load", "step", 0, 0),
            (0, "step/replay", "step", 0, 0),
            (1, "prefill", "prefill", 32, 32),
            (0, "step/collect", "step", 0, 1),
        ]
        engine.step()
        assert (1, "prefill", "prefill", 8, 8) in domain.take()


def test_attributes_are_made_once_for_each_name_and_payload(domain: Domain) -> None:
    with open_engine(device="cpu") as engine:
        engine.generate([PROMPT, LONG], greedy(20))
        names = Counter(name for _, name, *_ in domain.ranges)
        assert min(names[name] for name in STEPS) >= 20
        assert set(domain.made.values()) == {1}, domain.made


def test_ranges_are_closed_when_a_launch_fails_and_when_a_wait_is_interrupted(
    domain: Domain, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(device="cpu") as engine:
        engine.submit(PROMPT, greedy())

        def fail(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(engine.runtime.mailbox, "wait", fail)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        assert domain.open == 0
        replace_graph(engine, "decode/1/fast", SimpleNamespace(replay=fail))
        with pytest.raises(KeyboardInterrupt):
            run(engine)
        assert domain.open == 0


# Without a tool.


def test_without_a_domain_no_range_is_made() -> None:
    tracer = Tracer(None)
    assert not tracer.enabled
    assert tracer.span("step/plan", 8, 3) is NOTHING is tracer.span("capture/decode/8/fast")
    with tracer.span("load"), tracer.span("load"):
        pass


def test_a_step_without_a_tool_pays_for_no_range() -> None:
    """Its methods are those of the class body; with one, they are wrapped when it is imported."""
    assert not tracing.tracer.enabled
    for name in STEP_METHODS:
        assert not hasattr(getattr(EngineCore, name), "__wrapped__")
    assert "span(" not in inspect.getsource(EngineCore.step)


def test_a_payload_holds_both_counts() -> None:
    for rows, live in ((0, 0), (64, 1), (1024, 1023), (2**20, 2**20 - 1)):
        assert unpack(rows << 32 | live) == (rows, live)


def test_a_category_without_a_colour_is_a_mistake() -> None:
    with pytest.raises(KeyError, match="swap"):
        Tracer(Domain()).span("swap/out")


def python_calls(function: Callable[[], None]) -> list[str]:
    """Names of the Python functions that `function` calls, and those call."""
    entered: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return entered[1:]


def test_a_range_without_a_profiler_is_three_calls_that_keep_nothing() -> None:
    """Ranges of this process, and ranges that go all the way to a domain nobody listens to.

    What they take is for a quiet machine to say: `graphengine bench --record` measures it.
    """
    nvtx = pytest.importorskip("nvtx")
    for span in (tracing.span, Tracer(nvtx.get_domain("graphengine-test")).span):

        def enter(span: Callable[..., AbstractContextManager[None]] = span) -> None:
            with span("step/plan", live=1):
                pass

        enter()
        assert python_calls(enter) == ["span", "__enter__", "__exit__"]
        before = sys.getallocatedblocks()
        for _ in range(1000):
            enter()
        assert sys.getallocatedblocks() - before < 100


ASK = "import sys; {before}; from graphengine.observe.tracing import tracer; print(tracer.enabled)"


@pytest.mark.parametrize(
    ("before", "variables"),
    [
        ("pass", {"NVTX_DISABLE": "1"}),
        ("sys.modules['nvtx'] = None", {}),
        ("pass", {}),
    ],
    ids=["disabled", "missing", "no tool"],
)
def test_where_nothing_listens_ranges_are_off(before: str, variables: dict[str, str]) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NVTX_")}
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(before=before)],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"


LISTENED = """
import sys
from types import SimpleNamespace

class Domain:
    def get_event_attributes(self, **named):
        return named
    def push_range(self, attributes):
        print(attributes["message"])
    def pop_range(self):
        pass

sys.modules["nvtx"] = SimpleNamespace(enabled=lambda: True, get_domain=lambda name: Domain())
from engines.small_engine import greedy, open_engine
with open_engine(device="cpu", lookahead=0) as engine:
    engine.submit("x", greedy())
    print("step")
    engine.step()
"""


def test_where_a_tool_listens_an_engine_has_its_ranges() -> None:
    support = Path(__file__).parents[2] / "support"
    done = subprocess.run(
        [sys.executable, "-c", LISTENED],
        env=os.environ | {"PYTHONPATH": str(support), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    said = done.stdout.split()
    assert said[0] == "load" and said[1].startswith("capture/")
    # A prompt of one token: fed, and sampled from, by one replay.
    assert said[said.index("step") :] == [
        "step", "step/plan", "step/load", "step/replay", "prefill", "step/collect",
    ]  # fmt: skip


# With a tool, as NVTX attaches one: a library that NVTX_INJECTION64_PATH names. It prints a line
# for each call. Types and numbers are those of nvToolsExt.h and nvtxDetail/nvtxTypes.h.
TOOL = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    int64_t payload;
    int32_t message_type;
    const char *message;
} attributes_t;

typedef struct {
    size_t struct_size;
    int (*get_module_function_table)(int module, void ****table, unsigned *size);
} callbacks_t;

static FILE *out;
static char domain_handle;

static void *domain_create(const char *name) {
    fprintf(out, "domain %s\n", name);
    return &domain_handle;
}
static void *register_string(void *domain, const char *text) {
    char *copy = NULL;
    return asprintf(&copy, "%s", text) < 0 ? NULL : copy;
}
static void name_category(void *domain, uint32_t number, const char *name) {
    fprintf(out, "category %u %s\n", number, name);
}
static int push(void *domain, const attributes_t *range) {
    fprintf(out, "push %s %u %lld %d\n", range->message, range->category,
            (long long)range->payload, range->payload_type);
    return 0;
}
static int pop(void *domain) {
    fprintf(out, "pop\n");
    fflush(out);
    return 0;
}

int InitializeInjectionNvtx2(const void *(*get_export_table)(uint32_t)) {
    const callbacks_t *callbacks = get_export_table(1);
    void ***table;
    unsigned size;
    out = fopen(getenv("TOOL_OUT"), "a");
    if (!callbacks || !out || !callbacks->get_module_function_table(5, &table, &size)) return 0;
    *table[4] = push;
    *table[5] = pop;
    *table[8] = name_category;
    *table[10] = register_string;
    *table[12] = domain_create;
    return 1;
}
"""
TRACED = """
from graphengine.observe.tracing import span, tracer
assert tracer.enabled
with span("step/replay", 8, 3):
    with span("prefill", 64, 40):
        pass
with span("step/replay", 8, 3):
    pass
"""


@pytest.mark.skipif(importlib.util.find_spec("nvtx") is None, reason="nvtx is not installed")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler builds the tool")
def test_a_tool_gets_names_categories_and_payloads(tmp_path: Path) -> None:
    source, tool, out = (tmp_path / name for name in ("tool.c", "tool.so", "calls.txt"))
    source.write_text("#define _GNU_SOURCE\n#include <stdlib.h>\n" + TOOL)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tool), str(source)], check=True)
    environment = os.environ | {"NVTX_INJECTION64_PATH": str(tool), "TOOL_OUT": str(out)}
    environment.pop("NVTX_DISABLE", None)
    subprocess.run([sys.executable, "-c", TRACED], env=environment, check=True)
    lines = [line.split() for line in out.read_text().splitlines()]
    assert ["domain", tracing.DOMAIN] in lines
    categories = {line[2]: line[1] for line in lines if line[0] == "category"}
    integer = "2"
    replay = ["push", "step/replay", categories["step"], str(8 << 32 | 3), integer]
    prefill = ["push", "prefill", categories["prefill"], str(64 << 32 | 40), integer]
    calls = [line for line in lines if line[0] in ("push", "pop")]
    assert calls == [replay, prefill, ["pop"], ["pop"], replay, ["pop"]]


def test_an_engine_without_a_tool_runs_as_ever(engine: Engine) -> None:
    assert core.span.__self__ is tracing.tracer  # type: ignore[attr-defined]
    assert len(engine.generate(PROMPT, greedy(5)).token_ids) == 5
