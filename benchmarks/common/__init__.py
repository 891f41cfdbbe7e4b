# SPDX-License-Identifier: Apache-2.0
"""What several benchmarks share: an engine in this process, processes, tables and ratios."""
