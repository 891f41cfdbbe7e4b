# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The errors of a transfer."""

from vllm_ascend_kvext.errors import KvextError


class DescriptorError(KvextError, ValueError):
    """A descriptor table is wrong; no byte has moved.

    The message begins with ``<table>[<row>].<column>``. It names the expected and the found number,
    and the remedy.
    """


class BackendError(KvextError, RuntimeError):
    """A backend cannot run in this process, or its device refused; bytes may have moved."""


class PlacementError(KvextError, ValueError):
    """Copies cannot run on the CPUs that were named; nothing has been written."""
