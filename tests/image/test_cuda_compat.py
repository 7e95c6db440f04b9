"""The image's BASH_ENV script makes the same choice as the DLC's entry point, in a shell started as KubeRay starts one."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "image/cuda-compat.sh"
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Sep 16 19:36:31 UTC 2025\nGCC version: 14.2.1\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder)\nGCC version: 14.2.1\n"


def library_path(tmp_path: Path, driver: str | None, command: str = 'echo "$LD_LIBRARY_PATH"', banner: str = OPEN) -> str:
    """What a shell prints that KubeRay starts on a host with this driver, where the image's CUDA brings 580.95.05."""
    compat = tmp_path / "cuda/compat"
    compat.mkdir(parents=True)
    (compat / "libcuda.so.580.95.05").touch()
    (compat / "libcuda.so.1").symlink_to("libcuda.so.580.95.05")
    driver_file = tmp_path / "version"
    if driver:
        driver_file.write_text(banner.format(driver))
    environment = {
        **os.environ,
        "BASH_ENV": str(SCRIPT),
        "CUDA_HOME": str(tmp_path / "cuda"),
        "LD_LIBRARY_PATH": "/opt/lib",
        "NVIDIA_DRIVER_VERSION_FILE": str(driver_file),
    }
    result = subprocess.run(["/bin/bash", "-c", "--", command], env=environment, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return result.stdout.strip().replace(str(compat), "COMPAT")


@pytest.mark.parametrize("banner", [PROPRIETARY, OPEN])
@pytest.mark.parametrize("driver", ["550.163.01", "570.86.15", "580.65.06", "580.95.04", "580.82"])
def test_an_older_host_driver_gets_the_compatibility_library(tmp_path: Path, driver: str, banner: str):
    assert library_path(tmp_path, driver, banner=banner) == "COMPAT:/opt/lib"


@pytest.mark.parametrize("driver", ["580.95.05", "580.105.08", "595.20", "1000.1.1", None])
def test_a_newer_equal_or_absent_host_driver_changes_nothing(tmp_path: Path, driver: str | None):
    assert library_path(tmp_path, driver) == "/opt/lib"


def test_nested_shells_add_it_once_and_find_no_trace_of_it(tmp_path: Path):
    command = "set -u; bash -ec 'echo \"$LD_LIBRARY_PATH\"; ! declare -F | grep -q ray_finetune'"
    assert library_path(tmp_path, "570.86.15", command) == "COMPAT:/opt/lib"
