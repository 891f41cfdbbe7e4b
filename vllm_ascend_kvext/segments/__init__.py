# SPDX-License-Identifier: Apache-2.0
"""Reuse of KV at other positions, which is approximate: an extension of the connector.

The connector does not know it: see ``connector.extension``.
"""
