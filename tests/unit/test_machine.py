"""The machine, within the limits of a container."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from jupyter_loaderguard import machine


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group of our own, where the system's would be."""
    monkeypatch.setattr(machine, "_groups", lambda controller: (tmp_path,))
    return tmp_path


def write(group: Path, **files: str) -> None:
    for name, content in files.items():
        (group / name.replace("__", ".")).write_text(content)


def test_without_limits_it_is_the_machine(group: Path) -> None:
    write(group, memory__max="max\n", memory__current="1000\n", cpu__max="max 100000\n")
    state = machine.look()
    assert state.memory_bytes == psutil.virtual_memory().total
    assert state.cpus == len(os.sched_getaffinity(0))


def test_the_limit_of_the_container_counts_and_its_cached_files_do_not(group: Path) -> None:
    write(group, memory__max="1000000\n", memory__current="900000\n", memory__stat="anon 5\ninactive_file 300000\n")
    state = machine.look()
    assert (state.memory_bytes, state.memory_available_bytes) == (1_000_000, 400_000)


def test_the_first_version_of_control_groups_is_read_too(group: Path) -> None:
    write(group, memory__limit_in_bytes="1000000\n", memory__usage_in_bytes="900000\n")
    write(group, memory__stat="inactive_file 1\ntotal_inactive_file 100000\n")
    write(group, cpu__cfs_quota_us="50000\n", cpu__cfs_period_us="100000\n")
    state = machine.look()
    assert (state.memory_bytes, state.memory_available_bytes, state.cpus) == (1_000_000, 200_000, 1)


def test_a_share_of_a_cpu_counts_as_one(group: Path) -> None:
    write(group, cpu__max="50000 100000\n")
    assert machine.usable_cpus() == 1


def test_the_groups_of_this_process_are_found_up_to_the_root() -> None:
    for group in machine._groups("memory"):
        assert group.is_dir()
