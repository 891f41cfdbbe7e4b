# SPDX-License-Identifier: Apache-2.0
"""Checks of retention's state against the block pool."""
