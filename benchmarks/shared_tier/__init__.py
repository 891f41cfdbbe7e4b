# SPDX-License-Identifier: Apache-2.0
"""Compares the shared tier with plain files and others, see `transfers` and `first_token`."""
