# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Compares the shared tier with plain files and others, see `transfers` and `first_token`."""
