# SPDX-License-Identifier: Apache-2.0
"""The build of ``csrc/ascend``, with a stand-in for CANN: its CMake functions and four calls.

Shows that the launcher compiles against the declared calls, that both libraries land in the
package's folder and load from there. What CANN's own compiler makes of the kernel it cannot show.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.transfer.ascend_shim import SOURCES

from vllm_ascend_kvext.transfer.ascend.launcher import LIBRARY_NAME, KernelLauncher
from vllm_ascend_kvext.transfer.errors import BackendError

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")

PROJECT = f"""
cmake_minimum_required(VERSION 3.18)
project(stand_in LANGUAGES CXX)
add_subdirectory("{SOURCES}" ascend)
"""

# Compiles the kernel for the host and makes the launch header, as ascendc_library() does.
# CANN's own file sets CMAKE_SKIP_RPATH too.
ASCENDC_CMAKE = f"""
set(CMAKE_SKIP_RPATH TRUE)
function(ascendc_library name kind)
  add_library(${{name}} ${{kind}} ${{ARGN}} "${{ASCEND_CANN_PACKAGE_PATH}}/runtime.cpp")
  target_include_directories(${{name}} PRIVATE "{SOURCES}/shim")
  target_include_directories(${{name}} INTERFACE "${{ASCEND_CANN_PACKAGE_PATH}}/made")
endfunction()
function(ascendc_include_directories name scope)
  target_include_directories(${{name}} ${{scope}} ${{ARGN}})
endfunction()
add_library(ascendcl INTERFACE)
"""

ACL_H = """
#pragma once
#include <cstdint>
using aclError = int;
using aclrtStream = void*;
constexpr aclError ACL_SUCCESS = 0;
enum aclrtDevAttr { ACL_DEV_ATTR_VECTOR_CORE_NUM = 201 };
enum aclrtHostRegisterType { ACL_HOST_REGISTER_MAPPED = 0 };
extern "C" {
aclError aclrtGetDevice(int32_t* device);
aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t* value);
aclError aclrtHostRegister(void* host, uint64_t size, aclrtHostRegisterType type, void** device);
aclError aclrtHostUnregister(void* host);
}
"""

LAUNCH_H = """
#include "acl/acl.h"
#define ACLRT_LAUNCH_KERNEL(kernel) aclrtlaunch_##kernel
extern "C" uint32_t aclrtlaunch_kvext_page_transfer(uint32_t, aclrtStream, void* table);
"""

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
    root = tmp_path / "cann"
    files = {
        "tools/tikcpp/ascendc_kernel_cmake/ascendc.cmake": ASCENDC_CMAKE,
        "include/acl/acl.h": ACL_H,
        "made/aclrtlaunch_kvext_page_transfer.h": LAUNCH_H,
        "runtime.cpp": RUNTIME_CPP,
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (root / "lib64").mkdir()
    return root


def configure(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "CMakeLists.txt").write_text(PROJECT, encoding="utf-8")
    command = ["cmake", "-S", str(folder), "-B", str(folder / "build"), *options]
    # Without what a CANN of this machine would add.
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


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
    configured = configure(
        tmp_path,
        f"-G{generator}",
        f"-DASCEND_HOME_PATH={cann}",
        "-DSOC_VERSION=ascend910b1",
        f"-DCMAKE_INSTALL_PREFIX={tmp_path / 'installed'}",
    )
    assert configured.returncode == 0, configured.stderr
    for step in ("--build", "--install"):
        subprocess.run(["cmake", step, str(tmp_path / "build")], check=True, capture_output=True)

    package = tmp_path / "installed" / "vllm_ascend_kvext"
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


def test_without_cann_the_error_says_what_to_source(tmp_path: Path) -> None:
    configured = configure(tmp_path, "-DSOC_VERSION=ascend910b1")
    assert configured.returncode != 0
    assert "set_env.sh" in configured.stderr


def test_without_its_toolchain_the_error_says_what_to_install(tmp_path: Path, cann: Path) -> None:
    shutil.rmtree(cann / "tools")
    configured = configure(tmp_path, f"-DASCEND_HOME_PATH={cann}", "-DSOC_VERSION=ascend910b1")
    assert configured.returncode != 0
    assert "CANN toolkit" in configured.stderr


def test_without_a_chip_the_error_says_which_option(tmp_path: Path, cann: Path) -> None:
    configured = configure(tmp_path, f"-DASCEND_HOME_PATH={cann}")
    assert configured.returncode != 0
    assert "SOC_VERSION" in configured.stderr


def test_a_cann_without_device_info_is_refused(tmp_path: Path, cann: Path) -> None:
    """As 8.1.RC1."""
    header = cann / "include" / "acl" / "acl.h"
    lines = header.read_text(encoding="utf-8").splitlines(keepends=True)
    header.write_text("".join(line for line in lines if "GetDeviceInfo" not in line))
    (cann / "version.cfg").write_text("runtime_running_version=[8.1.0.1.200:8.1.RC1]\n")
    configured = configure(tmp_path, f"-DASCEND_HOME_PATH={cann}", "-DSOC_VERSION=ascend910b1")
    assert configured.returncode != 0
    message = " ".join(configured.stderr.split())
    assert "needs CANN 8.3.RC1 or newer: expected aclrtGetDeviceInfo" in message
    assert "8.1.RC1" in message
