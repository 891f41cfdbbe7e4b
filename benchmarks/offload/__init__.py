# SPDX-License-Identifier: Apache-2.0
"""The offload benchmark: `python benchmarks/offload/run.py --help`."""
