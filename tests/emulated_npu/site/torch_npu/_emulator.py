# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The compiled part. Its library is among the packages of the environment."""

from _emulated_npu import *  # noqa: F403
