# SPDX-License-Identifier: Apache-2.0
"""Retention decides which blocks stay in the prefix cache. One module per upstream module."""
