# SPDX-License-Identifier: Apache-2.0
"""What retention counts, in Prometheus and in the log. One module per upstream module."""
