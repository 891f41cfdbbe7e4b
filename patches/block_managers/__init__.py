# SPDX-License-Identifier: Apache-2.0
"""Block managers: what is put in place of methods of one, when it is made.

The fast path and retention both change how a manager looks up, allocates, caches and frees. Each
says which methods; here they are put together, once per manager, and nothing else is changed.
"""
