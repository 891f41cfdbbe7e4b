# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Models of 130,000 parameters that answer questions about documents, and the cost of blending.

`task.py` has the documents, `model.py` the models, and `weights/` the trained weights.
"""
