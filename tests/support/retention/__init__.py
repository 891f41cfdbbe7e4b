# SPDX-License-Identifier: Apache-2.0
"""Comparisons of retention's state with the block pool."""
