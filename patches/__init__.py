# SPDX-License-Identifier: Apache-2.0
"""The ledger: every change this package makes to upstream, in one tuple.

One folder per feature, in it one module per upstream module, named after it.
"""

from vllm_ascend_kvext.patches import (
    connector,
    fast_prefix_cache,
    lmcache,
    metrics,
    repairs,
    retention,
)
from vllm_ascend_kvext.patching.declaration import Patch

PATCHES: tuple[Patch, ...] = (
    *fast_prefix_cache.PATCHES,
    *retention.PATCHES,
    *repairs.PATCHES,
    *metrics.PATCHES,
    *connector.PATCHES,
    *lmcache.PATCHES,
)
