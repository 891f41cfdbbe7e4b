# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The data that LMCache's connector needs so that no engine reads wrong KV.

These modules read objects of vLLM and LMCache by their attributes, and import neither.
"""
