# SPDX-License-Identifier: Apache-2.0
"""KvextConnector: vLLM knows it by name, and it knows the scheduler that it works for.

Nothing is changed in an engine that is started without it.
"""

from vllm_ascend_kvext.patches.connector import (
    ascend_platform,
    core,
    executor,
    factory,
    model_loader,
    scheduler,
)
from vllm_ascend_kvext.patching.declaration import Patch

PATCHES: tuple[Patch, ...] = (
    *factory.PATCHES,
    *scheduler.PATCHES,
    *core.PATCHES,
    *executor.PATCHES,
    *model_loader.PATCHES,
    *ascend_platform.PATCHES,
)
