# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The worker side of the shared tier: moves objects, and knows the weights of its models."""
