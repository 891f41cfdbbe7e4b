# SPDX-License-Identifier: Apache-2.0
"""The compiled part, which lies among the packages of the environment."""

from _emulated_npu import *  # noqa: F403
