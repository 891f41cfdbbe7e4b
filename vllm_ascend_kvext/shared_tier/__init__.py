# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A shared tier keeps KV outside of the engine, as objects with names. It outlives engines.

`backend` declares what every backend promises; `files` and `mooncake` are backends. `names` decides
which engines share KV. `search` finds what the tier has of a prompt. No module here knows vLLM. The
package is imported only if the option ``shared_tier`` is set.
"""

import os

from vllm_ascend_kvext.shared_tier.backend import SharedTier
from vllm_ascend_kvext.shared_tier.files import FilesTier


def open_tier(
    url: str, capacity_bytes: int | None, rank: int, makes_folder: bool = True
) -> SharedTier:
    """Open the tier of one rank. See the backends for the arguments.

    Raises:
        SettingsError: If the tier cannot be used.
    """
    if not url.startswith("mooncake:"):
        return FilesTier(url, capacity_bytes, rank, makes_folder)
    from vllm_ascend_kvext.shared_tier.mooncake import MooncakeTier

    return MooncakeTier(url, rank)


def why_torch(url: str) -> str | None:
    """Why torch has to allocate pinned memory from which objects are put; None if it need not.

    Mooncake's transport for NPUs has been seen to refuse mappings, because CANN does not know of
    what type they are (issues 1406 and 4054 of kvcache-ai/Mooncake).
    """
    if url.startswith("mooncake:") and os.environ.get("MOONCAKE_PROTOCOL") == "ascend":
        return "MOONCAKE_PROTOCOL=ascend may refuse other memory."
    return None
