# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reuse of KV at other positions, an extension of the connector. Such reuse is approximate.

The connector does not import this package; see ``connector.extension``.
"""
