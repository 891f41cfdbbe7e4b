# SPDX-License-Identifier: Apache-2.0
"""The compiled part. Its library is among the packages of the environment."""

from _emulated_npu import *  # noqa: F403
