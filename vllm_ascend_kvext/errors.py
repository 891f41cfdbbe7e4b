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
