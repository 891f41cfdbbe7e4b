# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The device's runtime. Few of its functions are emulated."""

from acl import rt as rt
