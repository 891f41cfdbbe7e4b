# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reuse of KV behind a missing stretch of a prompt: only the stretch is computed."""
