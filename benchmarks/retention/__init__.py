# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The trace benchmark of retention: `python benchmarks/retention/run.py --help`."""
