# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The build of ``csrc/ascend``, with a stand-in for CANN: see `support.transfer.stand_in_cann`.

The tests show that the launcher compiles against the declared calls, and that both libraries land
in the package's folder and load from there. They cannot show what CANN's own compiler makes of the
kernel.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.transfer.stand_in_cann import configure, install, write_cann

from vllm_ascend_kvext.transfer.ascend.launcher import LIBRARY_NAME, KernelLauncher
from vllm_ascend_kvext.transfer.errors import BackendError

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")

RUNTIME_CPP = """
#include "include/acl/acl.h"
extern "C" {
aclError aclrtGetDevice(int32_t* device) { *device = 3; return 0; }
aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t* value) {
  *value = device == 3 && attribute == 201 ? 40 : -1;
  return 0;
}
aclError aclrtHostRegister(void* host, uint64_t size, aclrtHostRegisterType, void** device) {
  *device = static_cast<char*>(host) + size;
  return 0;
}
aclError aclrtHostUnregister(void*) { return 107002; }
uint32_t aclrtlaunch_kvext_page_transfer(uint32_t cores, aclrtStream stream, void* table) {
  return cores == 7 && stream == reinterpret_cast<void*>(11) &&
         table == reinterpret_cast<void*>(13) ? 0 : 1;
}
}
"""


@pytest.fixture
def cann(tmp_path: Path) -> Path:
    """A folder that looks like CANN's to the build."""
    return write_cann(tmp_path / "cann", RUNTIME_CPP)


def runpath(library: Path) -> str:
    """The line of the dynamic section that says where libraries are looked for."""
    listed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    (line,) = (line for line in listed.stdout.splitlines() if "RUNPATH" in line or "RPATH" in line)
    return line


@pytest.mark.parametrize("generator", ["Unix Makefiles", "Ninja"])
def test_builds_installs_and_loads(tmp_path: Path, cann: Path, generator: str) -> None:
    if generator == "Ninja" and shutil.which("ninja") is None:
        pytest.skip("needs ninja")
    package = install(tmp_path, cann, f"-G{generator}")
    names = sorted(path.name for path in package.iterdir())
    assert names == [LIBRARY_NAME, "libkvext_ascend_kernels.so"]
    assert "[$ORIGIN]" in runpath(package / LIBRARY_NAME)
    launcher = KernelLauncher(ctypes.CDLL(str(package / LIBRARY_NAME)))
    assert launcher.limits.tile_bytes % launcher.limits.data_block_bytes == 0
    assert launcher.num_cores() == 40
    launcher.map_host(4096, 100, owner=None)
    assert launcher.device_address(4096 + 60, 40) == 4096 + 100 + 60
    assert launcher.device_address(4096 + 61, 40) is None
    with pytest.raises(BackendError, match=r"kvext_ascend_unmap_host.*107002"):
        launcher.unmap_host(4096)
    launcher.launch(SimpleNamespace(data_ptr=lambda: 13), 7, 11)


@pytest.mark.parametrize(
    ("missing", "message"),
    [("CANN", "set_env.sh"), ("toolchain", "CANN toolkit"), ("chip", "SOC_VERSION")],
)
def test_the_error_says_what_is_missing(
    tmp_path: Path, cann: Path, missing: str, message: str
) -> None:
    if missing == "toolchain":
        shutil.rmtree(cann / "tools")
    options = {"CANN": f"-DASCEND_HOME_PATH={cann}", "chip": "-DSOC_VERSION=ascend910b1"}
    configured = configure(
        tmp_path, *(option for name, option in options.items() if name != missing)
    )
    assert configured.returncode != 0
    assert message in configured.stderr


def test_a_cann_without_device_info_is_refused(tmp_path: Path, cann: Path) -> None:
    """CANN 8.1.RC1 is like this."""
    header = cann / "include" / "acl" / "acl.h"
    lines = header.read_text(encoding="utf-8").splitlines(keepends=True)
    header.write_text("".join(line for line in lines if "GetDeviceInfo" not in line))
    (cann / "version.cfg").write_text("runtime_running_version=[8.1.0.1.200:8.1.RC1]\n")
    configured = configure(tmp_path, f"-DASCEND_HOME_PATH={cann}", "-DSOC_VERSION=ascend910b1")
    assert configured.returncode != 0
    message = " ".join(configured.stderr.split())
    assert "needs CANN 8.3.RC1 or newer: expected aclrtGetDeviceInfo" in message
    assert "8.1.RC1" in message
