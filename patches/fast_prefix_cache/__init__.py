# SPDX-License-Identifier: Apache-2.0
"""The prefix-cache path of the scheduler at a fraction of its cost, decision for decision.

There is one module per upstream module, named after it. Each has methods for one object of that
module, which `patches.block_managers` binds. These methods do exactly what upstream's do, for
retention as for dense caching. They leave to upstream what they do not cover.
"""
