# SPDX-License-Identifier: Apache-2.0
"""KV-cache reuse for hybrid models on vLLM and vLLM-Ascend."""

__version__ = "0.1.0"


def register() -> None:
    """Entry point of the ``vllm.general_plugins`` group; vLLM calls it in every process.

    Raises:
        KvextError: If an explicitly requested feature cannot be had, or a setting is wrong.
            vLLM does not start then.
    """
    # Importing the package stays free of vLLM and wrapt: vLLM turns a plugin that fails to import
    # into a log line, and then serves without it.
    from vllm_ascend_kvext import activation

    activation.register()
