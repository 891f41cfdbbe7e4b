# SPDX-License-Identifier: Apache-2.0
"""Nothing is profiled."""

from torch_npu.profiler import dynamic_profile as dynamic_profile
