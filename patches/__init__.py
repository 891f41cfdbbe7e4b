# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The ledger: every change this package makes to upstream, in one tuple.

There is one folder per feature. A folder has one module per upstream module, named after it. The
ledger has what the modules below this folder declare as ``PATCHES``, in the order of their names.
"""

import importlib
import pkgutil

from vllm_ascend_kvext.patching.declaration import Patch

PATCHES: tuple[Patch, ...] = tuple(
    patch
    for found in pkgutil.walk_packages(__path__, f"{__name__}.")
    for patch in getattr(importlib.import_module(found.name), "PATCHES", ())
)
