# SPDX-License-Identifier: Apache-2.0
"""The ledger: every change this package makes to upstream, in one tuple.

One folder per feature, in it one module per upstream module, named after it. What a module below
this folder declares as its ``PATCHES`` is in the ledger, by the names of folders and modules.
"""

import importlib
import pkgutil

from vllm_ascend_kvext.patching.declaration import Patch

PATCHES: tuple[Patch, ...] = tuple(
    patch
    for found in pkgutil.walk_packages(__path__, f"{__name__}.")
    for patch in getattr(importlib.import_module(found.name), "PATCHES", ())
)
