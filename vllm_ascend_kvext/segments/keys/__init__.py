# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reads how keys of a model turn with their positions, and checks it.

This package imports no vLLM: it reads the rotary modules that it is given.
"""
