# SPDX-License-Identifier: Apache-2.0
"""The trace benchmark of retention: `python benchmarks/retention/run.py --help`."""
