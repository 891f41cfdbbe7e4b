# SPDX-License-Identifier: Apache-2.0
"""LMCache's connector gets what it needs to know of hybrid models, and fails early.

Nothing is changed in an engine that is started without LMCacheMPConnector.
"""

from vllm_ascend_kvext.patches.lmcache import factory
from vllm_ascend_kvext.patching.declaration import Patch

PATCHES: tuple[Patch, ...] = (*factory.PATCHES,)
