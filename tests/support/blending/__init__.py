# SPDX-License-Identifier: Apache-2.0
"""Code of the tests of blending."""
