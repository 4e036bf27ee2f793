"""Reading the facts of a machine, with programs, drivers and torches that are not here."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from graphengine.models.plans import tuning_tables
from graphengine.observe import machine
from graphengine.observe.doctor import READ_VERSIONS, examine, problems
from graphengine.observe.findings import Plans

Smi = Callable[[str], None]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Puts an nvidia-smi that is this shell script in front of all programs."""

    def put(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return put


def test_the_facts_of_this_machine() -> None:
    found = machine.read_machine("0.1.0", READ_VERSIONS)
    software = found.software
    assert software.versions["torch"] == torch.__version__
    assert software.versions["triton"] == triton.__version__
    assert software.versions["numpy"] == metadata.version("numpy")
    assert software.torch_error is None and software.kernels_error is None
    assert len(found.gpus) == torch.cuda.device_count()
    assert found.threads == torch.get_num_threads()
    assert found.tables is not None and found.tables.path == Path(
        os.environ["GRAPHENGINE_CACHE_DIR"]
    )


def test_a_driver_is_read(smi: Smi) -> None:
    smi("echo '580.65, NVIDIA H200'; echo '580.65, NVIDIA H200'")
    driver = machine.read_driver()
    assert driver.version == "580.65" and driver.gpus == ("NVIDIA H200",) * 2
    assert driver.error is None
    smi("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    driver = machine.read_driver()
    assert driver.error == "Failed to initialize NVML: Driver/library version mismatch"
    assert driver.version is None and driver.gpus == ()
    smi("exit 9")
    assert machine.read_driver().error == "exit status 9"
    smi("exit 0")
    assert machine.read_driver().gpus == ()


def test_a_driver_that_hangs_is_not_waited_for(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_SMI_SECONDS", 0.2)
    smi("exec sleep 60")
    error = machine.read_driver().error
    assert error is not None and error.startswith("TimeoutExpired")


def test_without_nvidia_smi_the_driver_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    driver = machine.read_driver()
    assert driver.version is None and driver.error is None


class FakeCuda:
    """What `torch.cuda` is asked for, of two GPUs of which the first reaches the second."""

    def __init__(self, available: bool = True, warning: str = "") -> None:
        self._available, self._warning = available, warning

    def is_available(self) -> bool:
        if self._warning:
            warnings.warn(self._warning, stacklevel=2)
        return self._available

    def device_count(self) -> int:
        return 2

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(name=f"GPU {index}", major=8, minor=6, total_memory=24 * 2**30)

    def can_device_access_peer(self, a: int, b: int) -> bool:
        if (a, b) == (1, 0):
            raise RuntimeError("invalid device")
        return True

    def get_arch_list(self) -> list[str]:
        return ["sm_86"]


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeCuda, Exception | None], None]:
    """Puts such a torch, and kernels that fail so, in the place of those that are imported."""

    def put(cuda: FakeCuda, error: Exception | None) -> None:
        fake = SimpleNamespace(
            __version__="2.11.0+cu130",
            cuda=cuda,
            version=SimpleNamespace(cuda="13.0"),
            get_num_threads=lambda: 3,
        )
        usual = importlib.import_module

        def import_module(name: str) -> Any:
            if name == "torch":
                return fake
            if error is not None:
                raise error
            return usual(name)

        monkeypatch.setattr(machine.importlib, "import_module", import_module)

    return put


def test_kernels_that_fail_leave_the_gpus_their_names(fake_torch: Any) -> None:
    fake_torch(FakeCuda(), AttributeError("no attribute 'thread_barrier'\nmore"))
    found = machine.read_machine("0.1.0", READ_VERSIONS)
    assert [gpu.name for gpu in found.gpus] == ["GPU 0", "GPU 1"]
    assert all(gpu.device is None and gpu.plans is None for gpu in found.gpus)
    assert found.peers == {(0, 1)} and found.tables is None
    assert found.software.kernels_error == "AttributeError: no attribute 'thread_barrier'"
    assert found.software.architectures == ("sm_86",)
    names = [finding.name for finding in problems(examine(found))]
    assert "kernels" in names


def test_what_torch_says_without_a_gpu_is_kept(fake_torch: Any) -> None:
    text = "The NVIDIA driver on your system is too old (found version 12040)"
    fake_torch(FakeCuda(available=False, warning=text + "\nmore"), None)
    found = machine.read_machine("0.1.0", READ_VERSIONS)
    assert found.gpus == () and found.cuda_error == text


def test_a_torch_that_cannot_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(machine.importlib, "import_module", fail)
    found = machine.read_machine("0.1.0", READ_VERSIONS)
    error = "OSError: libcudart.so.13: cannot open shared object file"
    assert found.software.torch_error == error and found.gpus == ()
    assert [finding.name for finding in problems(examine(found))] == ["torch"]


@pytest.mark.parametrize(
    ("wanted", "version"),
    [
        (['triton==3.6.0; platform_system == "Linux"'], "3.6.0"),
        (["filelock", "triton == 3.7.1"], "3.7.1"),
        (["pytorch-triton==3.6.0"], None),
        (None, None),
    ],
)
def test_the_triton_that_torch_asks_for(
    wanted: list[str] | None, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.metadata, "requires", lambda name: wanted)
    assert machine.triton_of_torch() == version


def test_versions_of_what_is_installed_and_of_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.installed_version("numpy") == metadata.version("numpy")
    assert machine.installed_version("no_such_package") is None
    assert machine.installed_version("cuda-nothing") is None

    def nothing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine.metadata, "version", nothing)
    assert machine.installed_version("triton") == "unknown"


def test_the_compiler_is_the_one_that_triton_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.find_compiler() is None
    for name in ("clang", "gcc", "mine"):
        (tmp_path / name).touch(0o755)
        expected = "clang" if name == "clang" else "gcc"
        assert machine.find_compiler() == str(tmp_path / expected)
    monkeypatch.setenv("CC", "mine")
    assert machine.find_compiler() == str(tmp_path / "mine")
    monkeypatch.setenv("CC", "nothing")
    assert machine.find_compiler() is None


def test_the_cache_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert machine.triton_cache_path() == Path(triton.knobs.cache.dir)
    monkeypatch.setenv("TRITON_HOME", "/home/triton")
    assert machine.triton_cache_path() == Path("/home/triton/.triton/cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/cache")
    assert machine.triton_cache_path() == Path("/cache")


def test_a_folder_that_can_be_made_is_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.folder_at(tmp_path).writable
    assert machine.folder_at(tmp_path / "not" / "yet").writable
    assert not (tmp_path / "not").exists()
    (tmp_path / "file").touch()
    assert not machine.folder_at(tmp_path / "file").writable
    assert not machine.folder_at(tmp_path / "file" / "below").writable
    # The superuser may write anywhere.
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    assert not machine.folder_at(tmp_path).writable


def test_plans_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path))
    name = "NVIDIA H200"
    path = tuning_tables.user_table_path(name)
    shipped = len(tuning_tables.shipped_table(name))
    assert machine.read_plans(tuning_tables, name) == Plans(shipped=shipped, path=path)
    assert shipped > 100
    entry = next(iter(tuning_tables.shipped_table(name).items()))
    tuning_tables.write_table(path, name, dict([entry]))
    assert machine.read_plans(tuning_tables, name) == Plans(own=1, shipped=shipped, path=path)
    path.write_text("{")
    error = machine.read_plans(tuning_tables, name).error
    assert error is not None and error.startswith(f"{path} is not JSON")
    unknown = machine.read_plans(tuning_tables, "GPU of tomorrow")
    assert unknown.own == unknown.shipped == 0


def test_without_torch_and_triton_all_the_rest_is_told() -> None:
    """In a process that finds neither: nothing is imported that needs them."""
    code = """
        import sys

        class Hide:
            def __init__(self, finder):
                self.finder = finder

            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("torch", "triton"):
                    return None
                return self.finder.find_spec(name, path, target)

        sys.meta_path[:] = [Hide(finder) for finder in sys.meta_path]
        from graphengine.cli.main import main
        sys.exit(main(["doctor"]))
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr == ""
    assert "without torch there is no engine" in done.stdout
    assert "pip install 'torch==2.11.*'" in done.stdout
    assert "missing: an engine runs on a CPU only" in done.stdout
