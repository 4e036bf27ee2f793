"""What a host and the cgroups around a process leave, on trees that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graphengine.opening.budget import memory_plan as memory
from graphengine.opening.budget.host_memory import available_host_bytes

GIB = 2**30
V2 = "30 25 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 30 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 30 0:28 {} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
NO_LIMIT = 0x7FFF_FFFF_FFFF_F000
"""What v1 says where there is none."""


def host(root: Path, cgroup: str | None, mountinfo: str | None, gib: float = 100) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {2 * gib * 2**20:.0f} kB\nMemAvailable:   {gib * 2**20:.0f} kB\n"
    )
    for name, text in (("cgroup", cgroup), ("mountinfo", mountinfo)):
        if text is not None:
            (root / "proc/self" / name).write_text(text)
    return root


def group(root: Path, folder: str, **files: object) -> None:
    """A cgroup's files, of whose names `memory.` is left out."""
    path = root / "sys/fs/cgroup" / folder
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / f"memory.{name}").write_text(f"{text}\n")


def test_a_host_without_limits(tmp_path: Path) -> None:
    assert available_host_bytes(host(tmp_path, None, None)) == 100 * GIB


def test_v2_takes_the_tightest_of_all_ancestors(tmp_path: Path) -> None:
    root = host(tmp_path, "0::/pods/pod7/main\n", "not a mount\n" + V2)
    group(root, ".", stat="anon 5")
    group(root, "pods", max=90 * GIB, current=20 * GIB)
    group(root, "pods/pod7", max=30 * GIB, current=8 * GIB, stat="anon 1\ninactive_file 0")
    group(root, "pods/pod7/main", max="max", current=7 * GIB)
    assert available_host_bytes(root) == 22 * GIB
    group(root, "pods/pod7/main", max=20 * GIB)
    assert available_host_bytes(root) == 13 * GIB
    # The kernel throttles from here on.
    group(root, "pods/pod7/main", high=10 * GIB)
    assert available_host_bytes(root) == 3 * GIB
    group(root, "pods/pod7/main", high="max", max=NO_LIMIT)
    group(root, "pods/pod7", max="max")
    assert available_host_bytes(root) == 70 * GIB
    group(root, "pods", max="max")
    assert available_host_bytes(root) == 100 * GIB


def test_inactive_page_cache_is_not_in_use(tmp_path: Path) -> None:
    root = host(tmp_path, "0::/a\n", V2)
    stat = f"anon 1\nactive_file {2 * GIB}\ninactive_file {5 * GIB}\nbroken line here\n"
    group(root, "a", max=16 * GIB, current=9 * GIB, stat=stat)
    assert available_host_bytes(root) == 12 * GIB
    group(root, "a", current=GIB)
    assert available_host_bytes(root) == 16 * GIB, "less than nothing is not in use"
    group(root, "a", current=99 * GIB)
    assert available_host_bytes(root) == 0


@pytest.mark.parametrize("path", ["/", "/../../elsewhere", "/hidden/from/here"])
def test_a_namespace_mounts_its_own_group(tmp_path: Path, path: str) -> None:
    root = host(tmp_path, f"0::{path}\n", V2)
    group(root, ".", max=4 * GIB, current=GIB)
    assert available_host_bytes(root) == 3 * GIB


@pytest.mark.parametrize("mounted", ["/docker/abc", "/docker/abc/"])
def test_v1_in_a_container(tmp_path: Path, mounted: str) -> None:
    """The mount's root is the container's group, and the process sees its path on the host."""
    paths = "12:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/docker/abc\n"
    root = host(tmp_path, paths, V1.format(mounted))
    stat = f"inactive_file 5\ntotal_inactive_file {GIB}\n"
    group(root, "memory", limit_in_bytes=8 * GIB, usage_in_bytes=3 * GIB, stat=stat)
    group(root, "cpu", limit_in_bytes=1)
    assert available_host_bytes(root) == 6 * GIB


def test_v1_on_a_host(tmp_path: Path) -> None:
    root = host(tmp_path, "4:memory:/jobs/7\n0::/jobs/7\n", V1.format("/"))
    group(root, "memory", limit_in_bytes=NO_LIMIT, usage_in_bytes=50 * GIB)
    group(root, "memory/jobs", limit_in_bytes=40 * GIB, usage_in_bytes=30 * GIB)
    group(root, "memory/jobs/7", limit_in_bytes=NO_LIMIT, usage_in_bytes=GIB)
    assert available_host_bytes(root) == 10 * GIB


def test_a_hybrid_has_its_memory_in_v1(tmp_path: Path) -> None:
    unified = V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
    root = host(tmp_path, "4:memory:/a\n0::/a\n", unified + V1.format("/"))
    group(root, "unified/a", events="low 0")
    group(root, "memory/a", limit_in_bytes=2 * GIB, usage_in_bytes=GIB)
    assert available_host_bytes(root) == GIB


def test_mounts_with_spaces(tmp_path: Path) -> None:
    root = host(tmp_path, "0::/a b\n", V2.replace("cgroup rw", "my\\040groups rw"))
    group(root, "../my groups/a b", max=2 * GIB, current=GIB)
    assert available_host_bytes(root) == GIB


@pytest.mark.parametrize(
    ("cgroup", "mountinfo"),
    [
        ("", ""),
        ("garbage", V2),
        ("0::", V2),
        ("0::/a", "1 2 3\n - \ncgroup2\n1 2 3 4 5 - cgroup2\n"),
        ("4:cpu:/a\n", V1.format("/")),
        (":::::\n::", V1.format("/")),
    ],
)
def test_what_cannot_be_read_limits_nothing(tmp_path: Path, cgroup: str, mountinfo: str) -> None:
    root = host(tmp_path, cgroup, mountinfo)
    group(root, "a", max=GIB, current=0)
    assert available_host_bytes(root) == 100 * GIB


@pytest.mark.parametrize("limit", ["", "-5", "1e9", "12 kB", "٣", "max"])
def test_a_limit_that_is_no_number_limits_nothing(tmp_path: Path, limit: str) -> None:
    root = host(tmp_path, "0::/a\n", V2)
    group(root, "a", max=limit, current=0)
    assert available_host_bytes(root) == 100 * GIB


def test_a_limit_counts_where_its_use_cannot_be_read(tmp_path: Path) -> None:
    root = host(tmp_path, "0::/a\n", V2)
    group(root, "a", max=GIB)
    assert available_host_bytes(root) == GIB
    group(root, "a", current="?", stat="\0\0")
    assert available_host_bytes(root) == GIB


def test_the_host_itself_may_have_less(tmp_path: Path) -> None:
    root = host(tmp_path, "0::/a\n", V2, gib=1)
    group(root, "a", max=8 * GIB, current=0)
    assert available_host_bytes(root) == GIB


def test_plans_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < available_host_bytes() < 2**60
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 12345)
    assert memory.available_bytes(torch.device("cpu")) == 12345


def test_without_proc_it_is_half_of_the_machine(tmp_path: Path) -> None:
    fields = Path("/proc/meminfo").read_text().split()
    total = int(fields[fields.index("MemTotal:") + 1]) * 1024
    assert available_host_bytes(tmp_path) == pytest.approx(total / 2, rel=0.01)
