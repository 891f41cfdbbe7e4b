# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Completes Mooncake's wheel for tests of the shared tier: master, client and Python module.

All three load libibverbs, which few machines without RDMA have. If it is missing, a library of that
name is compiled beside Mooncake's own. That library finds no device, so Mooncake uses TCP.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

WHEEL = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
LIBRARIES = "mooncake_transfer_engine_non_cuda.libs"
"""The folder in site-packages in which Mooncake's programs look for libraries first."""

LIBRARY = "libibverbs.so.1"
FUNCTIONS = {
    "IBVERBS_1.0": "ibv_create_comp_channel ibv_destroy_comp_channel",
    "IBVERBS_1.1": (
        "ibv_ack_async_event ibv_ack_cq_events ibv_alloc_pd ibv_close_device ibv_create_cq "
        "ibv_create_qp ibv_dealloc_pd ibv_dereg_mr ibv_destroy_cq ibv_destroy_qp "
        "ibv_event_type_str ibv_fork_init ibv_free_device_list ibv_get_async_event "
        "ibv_get_cq_event ibv_get_device_list ibv_get_device_name ibv_modify_qp ibv_open_device "
        "ibv_query_device ibv_query_gid ibv_query_port ibv_query_qp ibv_reg_mr ibv_wc_status_str"
    ),
    "IBVERBS_1.8": "ibv_reg_mr_iova2",
    "IBVERBS_1.11": "_ibv_query_gid_ex",
}
"""The functions that version 0.3.13.post1 looks up, by the versions of their symbols."""


def has_library() -> bool:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def compile_library(folder: Path) -> None:
    """Compile a libibverbs that has no device into a folder.

    Raises:
        subprocess.CalledProcessError: The compiler failed.
        OSError: There is no compiler.
    """
    names = " ".join(FUNCTIONS.values()).split()
    code = "".join(f'extern "C" void* {name}() {{ return nullptr; }}\n' for name in names)
    versions = ""
    before = ""
    for version, exported in FUNCTIONS.items():
        versions += f"{version} {{ global: {exported.replace(' ', '; ')}; }} {before};\n"
        before = version
    script = folder / "libibverbs.map"
    script.write_text(versions)
    linked = ("-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", f"-Wl,--version-script={script}")
    command = [os.environ.get("CXX", "c++"), "-xc++", "-", *linked, "-o", str(folder / LIBRARY)]
    subprocess.run(command, input=code, text=True, check=True, capture_output=True)


def complete(python: Path, site_packages: Path) -> str:
    """Make the installed wheel loadable. Returns an error in words, or an empty text."""
    folder = site_packages / LIBRARIES
    try:
        if not has_library() and not (folder / LIBRARY).exists():
            compile_library(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no {LIBRARY}, and none can be compiled: {error}"
    command = [python, "-I", "-c", "import mooncake.store"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stderr.strip()[-300:]
