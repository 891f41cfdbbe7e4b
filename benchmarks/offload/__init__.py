# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The offload benchmark: `python benchmarks/offload/run.py --help`."""
