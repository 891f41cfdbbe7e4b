# SPDX-License-Identifier: Apache-2.0
"""The device's runtime, of which one function is emulated."""

from acl import rt as rt
