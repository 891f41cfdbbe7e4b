# SPDX-License-Identifier: Apache-2.0
"""The prefix-cache path of the scheduler at a fraction of its cost, decision for decision.

One module per upstream module, named after it. Each has methods for one object of that module:
`patches.block_managers` binds them. What these methods replace they do exactly as upstream, for
retention as for dense caching. What they do not cover they leave to upstream.
"""
