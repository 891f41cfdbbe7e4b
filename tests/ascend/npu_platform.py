# SPDX-License-Identifier: Apache-2.0
"""An environment in which vllm-ascend's ``NPUPlatform`` is vLLM's platform, without an NPU.

The configuration and the scheduler can be made there; a worker cannot.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ascend_sources import subprocess_environment
from support.serve_lines import ServeLine, Started, start

_ENTRY_POINTS = """[vllm.platform_plugins]
ascend = vllm_ascend:register
[vllm.general_plugins]
ascend_kv_connector = vllm_ascend:register_connector
"""


Start = Callable[..., Started]
"""What the fixture ``start_on_npu`` is: of a line, with a stage and variables."""


def starter(ascend_folder: Path, folder: Path) -> Start:
    """Starts lines with a model of attention and states.

    Args:
        ascend_folder: Holds vllm-ascend.
        folder: Empty; for the model, and for what vLLM keeps.
    """
    environ = npu_environment(ascend_folder, folder / "metadata")
    write_state_model(folder)

    def start_line(line: ServeLine, stage: str = "scheduler", **variables: str) -> Started:
        return start(line, folder, stage, environ | variables, folder)

    return start_line


def npu_environment(ascend_folder: Path, metadata_folder: Path) -> dict[str, str]:
    """What a process needs. vLLM finds platforms by the metadata of installed packages."""
    from vllm_ascend._version import __version__ as ascend_version

    metadata = metadata_folder / f"vllm_ascend-{ascend_version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm-ascend\nVersion: {ascend_version}\n"
    )
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
    environ = subprocess_environment(ascend_folder)
    environ["PYTHONPATH"] += os.pathsep + str(metadata_folder)
    return environ


def write_state_model(folder: Path) -> None:
    """The configuration of a Qwen3-Next: three layers of states, one of full attention."""
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        architectures=["Qwen3NextForCausalLM"],
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=8192,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    config.save_pretrained(folder)
