# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Gives LMCache's connector names and block sizes, so that engines do not read wrong KV.

Nothing is changed in an engine that is started without LMCacheMPConnector.
"""
