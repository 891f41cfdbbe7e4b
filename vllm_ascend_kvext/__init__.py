# SPDX-License-Identifier: Apache-2.0
"""KV-cache reuse for hybrid models on vLLM and vLLM-Ascend."""

__version__ = "0.1.0"


def register() -> None:
    """Entry point of the ``vllm.general_plugins`` group; vLLM calls it in every process."""
