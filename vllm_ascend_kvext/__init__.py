# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""KV-cache reuse for hybrid models on vLLM and vLLM-Ascend."""

import os

__version__ = "0.1.0"

# In a checkout, `patches/` lies beside this package, and not in it. vLLM inspects models in a
# process of its own, which has the working directory first on its path. If vLLM is started in a
# checkout, that process imports this file from the checkout.
_HERE = os.path.dirname(__file__)
if not os.path.isdir(os.path.join(_HERE, "patches")):
    __path__.append(os.path.dirname(_HERE))


def register() -> None:
    """Entry point of the ``vllm.general_plugins`` group; vLLM calls it in every process.

    Raises:
        KvextError: If a requested feature cannot be installed, or if a setting is wrong. vLLM does
            not start then.
    """
    # An import of this package must not import vLLM or wrapt. If the import of a plugin fails, vLLM
    # only logs a line, and then serves without the plugin.
    from vllm_ascend_kvext import activation

    activation.register()
