# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/config/kv_transfer.py``: a wrong option is an error of its command-line argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_ascend_kvext.patching.declaration import Patch

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig


def check_options(wrapped: Callable[[], None], transfer_config: KVTransferConfig) -> None:
    """Check the options of KvextConnector, as far as they can be understood by themselves."""
    wrapped()
    if transfer_config.kv_connector is not None:
        # Engines without a connector do not need this import.
        from vllm_ascend_kvext.engine_configuration import check_transfer_config

        check_transfer_config(transfer_config)


PATCHES = (
    Patch(
        id="KVX-418",
        target="vllm.config.kv_transfer:KVTransferConfig.__post_init__",
        feature="connector",
        wrapper=check_options,
        why="A wrong value of `--kv-transfer-config` is a usage error, which vLLM prints without a "
        "traceback. vLLM itself does not know the options of connectors.",
        retire_when="upstream asks connectors to check their options when it makes its "
        "configuration",
    ),
)
