# SPDX-License-Identifier: Apache-2.0
"""Models of 130,000 parameters that answer questions about documents, and what blending costs them.

`task.py` has the documents, `model.py` the models, `weights/` what they were trained to.
"""
