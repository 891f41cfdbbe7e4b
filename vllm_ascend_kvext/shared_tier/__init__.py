# SPDX-License-Identifier: Apache-2.0
"""KV that outlives an engine, and that engines share: objects by name, in somebody else's care.

`backend` is what every one promises; `files` and `mooncake` are two. `names` says whose KV may
meet, `search` what a prompt finds. Nothing here knows vLLM; without the option ``shared_tier``
nothing imports it.
"""

from vllm_ascend_kvext.shared_tier.backend import SharedTier
from vllm_ascend_kvext.shared_tier.files import FilesTier


def open_tier(
    url: str, capacity_bytes: int | None, rank: int, makes_folder: bool = True
) -> SharedTier:
    """The tier of one rank; raises SettingsError if it cannot be used. See the backends."""
    if not url.startswith("mooncake:"):
        return FilesTier(url, capacity_bytes, rank, makes_folder)
    from vllm_ascend_kvext.shared_tier.mooncake import MooncakeTier

    return MooncakeTier(url, rank)
