# SPDX-License-Identifier: Apache-2.0
"""What retention counts, in Prometheus and in the log. One module per upstream module."""

from vllm_ascend_kvext.patches.metrics import (
    loggers,
    output_processor,
    stats,
)
from vllm_ascend_kvext.patching.declaration import Patch

PATCHES: tuple[Patch, ...] = (
    *loggers.PATCHES,
    *output_processor.PATCHES,
    *stats.PATCHES,
)
