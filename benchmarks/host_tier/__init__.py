# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the host tier's hit rates; `run` is the command."""
