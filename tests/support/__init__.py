# SPDX-License-Identifier: Apache-2.0
"""Code of several test suites and benchmarks."""
