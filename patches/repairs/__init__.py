# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Repairs of upstream defects. They are on by default, have a switch each, and are independent.

There is one module per upstream module, with the same name. `discarded_frames` and `aligned_steps`
also repair the module ``scheduler``; `state_hits` has what several schedulers share. The repairs
know of retention only whether it is on.
"""
