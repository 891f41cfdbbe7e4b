# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The prefix-cache path of the scheduler at a fraction of its cost, decision for decision.

There is one module per upstream module, named after it. Each has methods for one object of that
module, which `patches.block_managers` binds. These methods do exactly what upstream's methods do,
with and without retention. Cases that they do not cover are left to upstream.
"""
