# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The benchmark of blending: `python benchmarks/blending/run.py --help`."""
