# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Describes a shared tier for ``status --shared-tier``: whether it works, and what it holds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from vllm_ascend_kvext.errors import KvextError
from vllm_ascend_kvext.shared_tier import open_tier
from vllm_ascend_kvext.shared_tier.backend import SEAL_BYTES, Answer, SharedObject, SharedTier
from vllm_ascend_kvext.shared_tier.names import FORMAT_VERSION, differences

# Only the engines of a tier know its capacity. With this number the command removes nothing.
_NO_LIMIT_BYTES = 1 << 62


def describe(url: str) -> tuple[bool, list[str]]:
    """Put one object into a tier and get it back. A missing folder is not created.

    Returns:
        Whether the tier works, and lines for a person.
    """
    try:
        tier = open_tier(url, _NO_LIMIT_BYTES, rank=0, makes_folder=False)
    except KvextError as error:
        return False, [str(error)]
    what = SharedObject(0, f"status-check/T0-{os.getpid()}-0{'0' * 31}", 0, 4096)
    tier.register(memoryview(bytearray(os.urandom(4096 + SEAL_BYTES))))
    began_s = time.perf_counter()
    is_well = tier.put(what) is tier.get_into(what, lambda _: None) is Answer.WHOLE
    tier.forget(what.name)
    milliseconds = (time.perf_counter() - began_s) * 1000
    state = f"works (an object there and back: {milliseconds:.1f} ms)" if is_well else "FAILS"
    return is_well, [f"shared tier {url}, format {FORMAT_VERSION}: {state}", *_contents(tier)]


def _contents(tier: SharedTier) -> Iterator[str]:
    summary, held = tier.describe()
    yield summary
    engines = tier.engines()
    names = sorted(engines, key=[*held, *engines].index)
    for name in names:
        yield f"  name space {name}: {held.get(name, 'no objects that can be counted')}"
    for other in names[1:]:
        apart = "; ".join(differences(engines[names[0]], engines[other]))
        yield f"  {names[0]} ('here') and {other} ('there') do not meet: {apart}"
