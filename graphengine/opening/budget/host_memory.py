"""How much host memory this process may still take, under container limits, and what an allocation
takes.

In a container /proc/meminfo is the host's. The limit of a pod is set on a cgroup: the process's own
or one around it. Both versions of cgroups are read, from the files that the kernel documents
(Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst). A file that is missing or has
other contents sets no limit.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

ROOT = Path("/")


class _Files(NamedTuple):
    """Names of a cgroup version's files: a group's limit, its use, and the part of it that is page
    cache which the kernel reclaims first, as in `docker stats`.
    """

    limits: tuple[str, ...]
    used: str
    reclaimable: tuple[str, ...]


_FILES = {
    "cgroup2": _Files(("memory.max", "memory.high"), "memory.current", ("inactive_file",)),
    "cgroup": _Files(
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_inactive_file", "inactive_file"),
    ),
}


def available_host_bytes(root: Path = ROOT) -> int:
    """Bytes that this process could take now: the host's MemAvailable, or less where a cgroup
    around the process leaves less. `root` is the folder that holds `proc` and the mounts.

    Without /proc/meminfo, as on macOS, it is half of the machine's memory; on Windows it is what
    the system reports as available.
    """
    if not (root / "proc/meminfo").is_file():
        if hasattr(os, "sysconf"):
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        return _available_on_windows()
    with open(root / "proc/meminfo", encoding="ascii") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    left = (_left(group, _FILES[kind]) for kind, group in _groups(root))
    return min([available, *(found for found in left if found is not None)])


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of the Win32 API."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("total", "available", "pages", "free_pages")),
        *((name, ctypes.c_uint64) for name in ("virtual", "free_virtual", "extended")),
    ]


def _available_on_windows() -> int:
    status = _MemoryStatus(size=ctypes.sizeof(_MemoryStatus))
    kernel: Any = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined, unused-ignore]
    if not kernel.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("GlobalMemoryStatusEx does not tell how much memory is available")
    return int(status.available)


def host_bytes(size: int, *, pinned: bool) -> int:
    """Bytes that a host allocation takes: torch rounds pinned ones up to a power of two."""
    return 1 << (size - 1).bit_length() if pinned and size else size


def _left(group: Path, files: _Files) -> int | None:
    """Bytes that a group may still take; None where it has no limit."""
    limits = [_number(_text(group / name)) for name in files.limits]
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    # Each line is "name value".
    stat = dict(re.findall(r"^(\w+) (\d+)$", _text(group / "memory.stat"), re.MULTILINE))
    cache = next((int(stat[name]) for name in files.reclaimable if name in stat), 0)
    used = max(0, (_number(_text(group / files.used)) or 0) - cache)
    return max(0, min(known) - used)


def _groups(root: Path) -> Iterator[tuple[str, Path]]:
    """Versions and folders of the process's cgroups and their parents, as far as visible."""
    paths = _paths(_text(root / "proc/self/cgroup"))
    for kind, mounted_root, mount_point in _mounts(_text(root / "proc/self/mountinfo")):
        if kind not in paths:
            continue
        path = PurePosixPath(paths[kind])
        # In a namespace or a bind mount, whose path lies elsewhere, the mount itself is the group.
        below = path.relative_to(mounted_root) if path.is_relative_to(mounted_root) else path
        if ".." in below.parts or below.is_absolute():
            below = PurePosixPath()
        folder = root / mount_point.lstrip("/")
        yield from ((kind, folder / part) for part in (below, *below.parents))


def _paths(cgroup: str) -> dict[str, str]:
    """By version, the path of the group that counts memory; `cgroup` is /proc/self/cgroup."""
    found = {}
    for line in cgroup.splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if (number, controllers) == ("0", "") and path:
            found["cgroup2"] = path
        elif "memory" in controllers.split(",") and path:
            found["cgroup"] = path
    return found


def _mounts(mountinfo: str) -> Iterator[tuple[str, str, str]]:
    """Version, root and mount point of each mounted hierarchy that may count memory."""
    for line in mountinfo.splitlines():
        mount, _, source = (part.split() for part in line.partition(" - "))
        if len(mount) < 5 or len(source) < 3 or source[0] not in _FILES:
            continue
        if source[0] == "cgroup" and "memory" not in source[2].split(","):
            continue
        yield source[0], _unescaped(mount[3]), _unescaped(mount[4])


def _unescaped(path: str) -> str:
    """A path from mountinfo, where spaces and backslashes are octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    """The integer in a file; None if there is none, also for "max"."""
    stripped = text.strip()
    return int(stripped) if stripped.isascii() and stripped.isdecimal() else None
