# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Block managers: methods of a manager are replaced when the manager is made.

The fast path and retention both change how a manager looks up, allocates, caches and frees. Each
feature names its methods. This package puts them together, once per manager, and changes nothing
else.
"""
