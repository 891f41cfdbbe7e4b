# SPDX-License-Identifier: Apache-2.0
"""The exceptions of this package; nothing else is raised on purpose."""


class KvextError(Exception):
    """Base class. A message says what, where, expected, found and the remedy."""


class SettingsError(KvextError, ValueError):
    """An environment variable has a wrong name or value."""


class PatchError(KvextError, RuntimeError):
    """A feature cannot be installed into the upstream at hand; nothing of it is in place."""


class FingerprintError(KvextError, LookupError):
    """A function's source cannot be found, so that there is nothing to compare."""


class CompiledModuleError(KvextError, RuntimeError):
    """The compiled module is missing, does not load, or is not that of this package."""


class LMCacheError(KvextError):
    """LMCache is not the one whose connector was read, or the layout of KV cannot be named.

    Args:
        remedy: What to do, as sentences without the last full stop.
    """

    def __init__(self, expected: str, found: str, remedy: str) -> None:
        # All of them, in order: an exception that crosses a process is made again of its ``args``.
        super().__init__(expected, found, remedy)

    def __str__(self) -> str:
        expected, found, remedy = self.args
        return f"LMCacheMPConnector: expected {expected}, found {found}. {remedy}."


class GroupError(KvextError, ValueError):
    """A KV cache group contradicts itself, or is not understood.

    The message names the layer or group, both numbers and the remedy.
    """


class LayoutError(GroupError):
    """The KV cache config and the registered tensors contradict each other, or are not understood.

    The message names the layer or group, both numbers and the remedy.
    """


class TokenRangeError(KvextError, ValueError):
    """A token range, or the block ids that come with it, does not fit the layout."""


class SegmentError(KvextError, ValueError):
    """What a request says of its segments is wrong, or a segment cannot be stored or placed."""


class BlendingError(KvextError, ValueError):
    """Segments of this model, or in pages as these are, cannot be reused."""


class TierError(KvextError, ValueError):
    """A call that does not fit what the tier holds; nothing has changed."""


class ConnectorError(KvextError):
    """The connector cannot work with this configuration, or was used out of order."""
