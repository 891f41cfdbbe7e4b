# SPDX-License-Identifier: Apache-2.0
"""Shows the counters of retention in Prometheus and in the log. One module per upstream module."""
