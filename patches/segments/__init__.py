# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Segments of KvextConnector: the changes of a scheduler that only segments need.

Nothing is changed in an engine whose connector reuses no segments.
"""
