# SPDX-License-Identifier: Apache-2.0
"""Block managers: methods of each one are replaced when it is made.

The fast path and retention both change how a manager looks up, allocates, caches and frees. Each
names its methods. This package puts them together, once per manager, and changes nothing else.
"""
