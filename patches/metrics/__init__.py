# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Shows the counters of retention in Prometheus and in the log. One module per upstream module."""
