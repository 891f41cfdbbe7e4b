# SPDX-License-Identifier: Apache-2.0
"""The benchmark of blending: `python benchmarks/blending/run.py --help`."""
