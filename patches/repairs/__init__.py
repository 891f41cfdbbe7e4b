# SPDX-License-Identifier: Apache-2.0
"""Repairs of upstream defects: on by default, each with a switch, none of them needs the others.

One module per upstream module, named after it; `discarded_frames` and `aligned_steps`, too, are for
the scheduler's.
Knows nothing of retention but whether it is on.
"""
