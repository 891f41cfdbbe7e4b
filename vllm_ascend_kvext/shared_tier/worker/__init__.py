# SPDX-License-Identifier: Apache-2.0
"""The worker side of the shared tier: moves objects, and knows the weights of its models."""
