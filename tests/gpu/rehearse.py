# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Have vLLM's wheel for CUDA accept the arguments of all engines, on a machine without a GPU.

    PYTHONPATH=/tmp/kvext_gpu/site python tests/gpu/rehearse.py

The wheels are those of `wheels.py`, with Python 3.12 and torch for CUDA. A stand-in for the library
of the driver lets vLLM's kernels be imported, and answers in place of NVML name an H100. So missing
packages, wrong arguments and other attention than expected are found before time on a GPU is spent.
Nothing is computed. It needs a C compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# ``tests`` replaces this folder on the path.
_HERE = Path(__file__).resolve().parent
ROOT = _HERE.parents[1]
sys.path[:] = [*(path for path in sys.path if path != str(_HERE)), str(_HERE.parent)]

STUB = "KVEXT_STUB_OF_DRIVER"
SYMBOLS = (
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuGetErrorString",
    "cuGetProcAddress_v2",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemGetAllocationGranularity",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuPointerGetAttribute",
    "cuTensorMapEncodeTiled",
)
"""The functions of the driver that vLLM's kernels are linked with. Each answers: no device."""
IMPORTED = (
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.kv_offload.cpu.gpu_worker",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.compilation.backends",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.qwen3",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
"""Modules that engines import. Triton's kernels for states are not among them: they ask the driver
for more."""


def start_with_stub() -> None:
    """Start this program again, with the stand-in where the loader looks first."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name, "stub.c")
        source.write_text("".join(f"int {each}(void) {{ return 100; }}\n" for each in SYMBOLS))
        library = str(Path(name, "libcuda.so.1"))
        flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library]
        subprocess.run(["cc", str(source), *flags], check=True)
        path = os.pathsep.join([name, os.environ.get("LD_LIBRARY_PATH", "")])
        environ = {**os.environ, STUB: name, "TRITON_CACHE_DIR": name, "LD_LIBRARY_PATH": path}
        sys.exit(subprocess.run([sys.executable, __file__], env=environ).returncode)


def have_h100() -> None:
    """Let NVML and torch answer as beside an H100."""
    import torch
    from vllm.third_party import pynvml

    memory = SimpleNamespace(total=80 << 30, free=79 << 30, used=1 << 30)
    answers: Mapping[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlDeviceGetName": "NVIDIA H100",
        "nvmlDeviceGetUUID": "GPU-0",
        "nvmlDeviceGetMemoryInfo": memory,
    }
    for name, answer in answers.items():
        setattr(pynvml, name, lambda *_, answer=answer: answer)
    of_torch: Mapping[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H100",
    }
    for name, answer in of_torch.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)


class Rehearsal:
    """Counts what fails."""

    def __init__(self) -> None:
        self.num_failed = 0

    def run(self, what: str, act: Any) -> None:
        try:
            print(f"ok    {what}: {act()}", flush=True)
        except Exception as error:
            self.num_failed += 1
            print(f"WRONG {what}: {error!r}"[:700], flush=True)
            traceback.print_exc(limit=-4)


def engine_arguments() -> Mapping[str, dict[str, Any]]:
    """The arguments of all engines by name. Models are written into a folder that stays."""
    from gpu import check_engines, measure
    from support.scenarios.engine import COMMON

    found = {}
    folder = Path(tempfile.mkdtemp())
    for name in check_engines.CASES:
        of_case = folder / name.replace(" ", "_")
        of_case.mkdir()
        rows = check_engines.Rows(of_case / "rows")
        checks = check_engines.Checks(name, "cuda", rows, of_case, is_quick=False)
        connector = checks.blending() if checks.case.blends else checks.connector()
        for mode in ("eager", "graphs"):
            eager = {"enforce_eager": mode == "eager"}
            plan = checks.plan((), "connector", connector, eager).on(checks.platform)
            found[f"{name}, {mode}"] = {**COMMON, **plan["engine"], "model": plan["model"]}
    large = folder / "1b"
    measure.write_1b(large)
    for contender in measure.contenders("cuda"):
        found[f"1B, {contender.name}"] = {
            "model": str(large),
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_num_seqs": 5,
            "disable_hybrid_kv_cache_manager": False,
            **measure.engine_options("cuda"),
            **(
                {"kv_transfer_config": dict(contender.kv_transfer_config)}
                if contender.kv_transfer_config
                else {}
            ),
        }
    return found


def accept(arguments: Mapping[str, Any]) -> str:
    """Make the configuration of an engine. Returns what vLLM chose."""
    from vllm.config import CompilationConfig, KVTransferConfig, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    made = dict(arguments)
    for name, made_of in (
        ("kv_transfer_config", KVTransferConfig),
        ("compilation_config", CompilationConfig),
    ):
        if name in made:
            made[name] = made_of(**made[name])
    config = EngineArgs(**made).create_engine_config()
    model = config.model_config
    selected = AttentionSelectorConfig(
        head_size=model.get_head_size(),
        dtype=model.dtype,
        kv_cache_dtype="auto",
        block_size=config.cache_config.block_size,
        use_mla=model.use_mla,
    )
    with set_current_vllm_config(config):
        capability = current_platform.get_device_capability()
        valid, _ = current_platform.get_valid_backends(capability, selected, 4)
    runner = "V2" if config.use_v2_model_runner else "V1"
    graphs = config.compilation_config
    return (
        f"{valid[0][0].name}, {runner} runner, {graphs.cudagraph_mode.name} of "
        f"{graphs.cudagraph_capture_sizes}, blocks of {config.cache_config.block_size} tokens"
    )


def main() -> None:
    if STUB not in os.environ:
        start_with_stub()
    from gpu.run import ENVIRON

    os.environ |= {**ENVIRON, "VLLM_LOGGING_LEVEL": "ERROR"}
    have_h100()
    sys.path.append(str(ROOT / "benchmarks"))
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # As an engine does, before it imports more.
    rehearsal = Rehearsal()
    for name in IMPORTED:
        rehearsal.run(f"import {name}", lambda name=name: __import__(name).__name__)
    import torch
    from vllm import _custom_ops  # noqa: F401 (registers the operator that copies batches)

    rehearsal.run("the operator", lambda: torch.ops._C_cache_ops.swap_blocks_batch.default._schema)
    for name, arguments in engine_arguments().items():
        rehearsal.run(name, lambda arguments=arguments: accept(arguments))
    print(f"{rehearsal.num_failed} failed")
    sys.exit(bool(rehearsal.num_failed))


if __name__ == "__main__":
    main()
