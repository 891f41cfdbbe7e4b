# SPDX-License-Identifier: Apache-2.0
"""The ledger: every change this package makes to upstream, in one tuple."""

from vllm_ascend_kvext.patching.declaration import Patch

PATCHES: tuple[Patch, ...] = ()
