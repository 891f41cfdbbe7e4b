# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The exceptions of this package. The package raises no other errors on purpose."""

DOCS_URL = "https://github.com/vllm-ascend-kvext/vllm-ascend-kvext/blob/main/docs/"
"""The folder of the pages that messages name. A wheel does not have them."""


class KvextError(Exception):
    """The base class. A message names what, where, expected, found and the remedy."""


class SettingsError(KvextError, ValueError):
    """An environment variable, or an option of the connector, has a wrong name or value."""


class PatchError(KvextError, RuntimeError):
    """A feature cannot be installed into this upstream. None of its patches is in place."""


class FingerprintError(KvextError, LookupError):
    """The source of a function cannot be found, so it cannot be compared."""


class CompiledModuleError(KvextError, RuntimeError):
    """The compiled module is missing, does not load, or belongs to another version."""


class LMCacheError(KvextError):
    """The installed LMCache is not supported, or the layout of KV cannot be named.

    Args:
        expected: What was expected.
        found: What was found.
        remedy: What to do, as sentences without the last full stop.
    """

    def __init__(self, expected: str, found: str, remedy: str) -> None:
        # An exception that crosses a process boundary is created again from its ``args``. So
        # ``args`` must have all arguments in order.
        super().__init__(expected, found, remedy)

    def __str__(self) -> str:
        expected, found, remedy = self.args
        return f"LMCacheMPConnector: expected {expected}, found {found}. {remedy}."


class GroupError(KvextError, ValueError):
    """A KV cache group contradicts itself, or is not supported.

    The message names the layer or group, both numbers and the remedy.
    """


class LayoutError(GroupError):
    """The KV cache config and the registered tensors contradict each other, or are not supported.

    The message names the layer or group, both numbers and the remedy.
    """


class TokenRangeError(KvextError, ValueError):
    """A token range, or the block ids that come with it, does not fit the layout."""


class SegmentError(KvextError, ValueError):
    """A request describes its segments wrongly, or a segment cannot be stored or placed."""


class BlendingError(KvextError, ValueError):
    """The segments of this model, or segments in pages of this form, cannot be reused."""


class TierError(KvextError, ValueError):
    """A call does not fit what the tier holds; nothing has changed."""


class ConnectorError(KvextError):
    """The connector cannot work with this configuration, or was called in the wrong order."""


class TraceError(KvextError, ValueError):
    """A log of requests cannot be read.

    The message names the file and the line, what was expected and found, and the remedy.
    """


class ReplayError(KvextError, ValueError):
    """A log cannot be played with this model, or with these arguments."""
