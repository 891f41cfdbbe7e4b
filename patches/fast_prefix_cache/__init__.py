# SPDX-License-Identifier: Apache-2.0
"""The prefix-cache path of the scheduler at a fraction of its cost, decision for decision.

One module per upstream module, named after it. What these patches replace they do exactly as
upstream, for retention as for dense caching, and know nothing of either: what retention does
otherwise wraps them. What they do not cover they leave to upstream.
"""
