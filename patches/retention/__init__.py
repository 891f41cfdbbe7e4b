# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Retention decides which blocks stay in the prefix cache. One module per upstream module."""
