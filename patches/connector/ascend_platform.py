# SPDX-License-Identifier: Apache-2.0
"""``vllm_ascend/platform.py``: a refused ``recompute`` says what would allow it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_ascend_kvext.connector.common.errors import ConnectorError
from vllm_ascend_kvext.patching.declaration import Patch
from vllm_ascend_kvext.settings import DISABLE_VARIABLE, Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_REPAIR = "failed-loads"


def explain_refusal(wrapped: Callable[..., None], _instance: None, vllm_config: VllmConfig) -> None:
    """Let vLLM-Ascend check; a ConnectorError takes the place of its bare assertion."""
    try:
        wrapped(vllm_config)
    except AssertionError as error:
        if _REPAIR in Settings.from_environ(os.environ).disabled:
            why = f"{DISABLE_VARIABLE} names it. Take it out of {DISABLE_VARIABLE}"
        else:
            why = "`python -m vllm_ascend_kvext status --patches` says why. Mend that"
        raise ConnectorError(
            "kv_load_failure_policy of --kv-transfer-config: found recompute, expected fail: the "
            "model has attention and states, and vLLM-Ascend refuses to recompute their failed "
            f"loads. The repair {_REPAIR!r} can, but is not in effect: {why}. Or use another "
            "connector than KvextConnector with kv_load_failure_policy=fail: then a request whose "
            "load fails ends with an error"
        ) from error


PATCHES = (
    Patch(
        id="KVX-409",
        target="vllm_ascend.platform:NPUPlatform._validate_kv_load_failure_policy",
        feature="connector",
        wrapper=explain_refusal,
        why="Where the repair `failed-loads` is not in effect, the refusal of "
        "`kv_load_failure_policy=recompute` does not say what would allow it.",
        retire_when="KVX-127 is retired",
    ),
)
