# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The build of ``csrc/ascend`` without CANN. CANN's CMake functions and five calls are replaced.

CMake, the launcher and the kernel are the real ones. The caller defines the calls of CANN's
runtime. The kernel is compiled for the host, against the shim.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.transfer.ascend_shim import SHIM, SOURCES

PACKAGE = "vllm_ascend_kvext"
"""The folder into which both libraries are installed."""

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
  target_include_directories(${{name}} PRIVATE "{SHIM}")
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


def write_cann(root: Path, runtime: str) -> Path:
    """Write a folder that looks like CANN's to the build.

    Args:
        runtime: C++ that defines the calls of ``acl.h`` and the launch of the kernel. It includes
            ``acl.h`` as ``include/acl/acl.h``.
    """
    files = {
        "tools/tikcpp/ascendc_kernel_cmake/ascendc.cmake": ASCENDC_CMAKE,
        "include/acl/acl.h": ACL_H,
        "made/aclrtlaunch_kvext_page_transfer.h": LAUNCH_H,
        "runtime.cpp": runtime,
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (root / "lib64").mkdir()
    return root


def configure(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Let CMake write a build into a folder."""
    (folder / "CMakeLists.txt").write_text(PROJECT, encoding="utf-8")
    command = ["cmake", "-S", str(folder), "-B", str(folder / "build"), *options]
    # A CANN on this machine would add more variables.
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def install(folder: Path, cann: Path, *options: str) -> Path:
    """Build both libraries, and install them below a folder. Return their folder."""
    configured = configure(
        folder,
        f"-DASCEND_HOME_PATH={cann}",
        "-DSOC_VERSION=ascend910b1",
        f"-DCMAKE_INSTALL_PREFIX={folder / 'installed'}",
        *options,
    )
    assert configured.returncode == 0, configured.stderr
    for step in ("--build", "--install"):
        done = subprocess.run(
            ["cmake", step, str(folder / "build")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "installed" / PACKAGE
