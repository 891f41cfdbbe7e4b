# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Models with states (GDN, Mamba2) on vLLM's CPU engine, in float32, with and without drafts.

vLLM's CPU engine lacks parts for such models. The modules add these parts to the process of a test:

- `gated_delta_rule`: the attention of GDN layers in float32;
- `first_runner`: kernels of the V1 model runner that have no CPU code;
- `known_drafts`: a proposer of drafts that are right with a given probability.

`state_models` writes small models with random weights. `support.scenarios.states` is the module of
scenarios that plans name. A test starts an engine like this::

    from support.scenarios.processes import LazyReports, Plan
    from support.scenarios.states import MTP, plan

    process = (environ, {"name": plan(folder, ["sightings"], drafts=MTP, is_async=True)})
    LazyReports(tmp_path_factory, [process])["name"].answers("device")
"""
