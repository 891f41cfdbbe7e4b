# SPDX-License-Identifier: Apache-2.0
"""Code of several benchmarks: an engine in this process, processes, tables and ratios."""
