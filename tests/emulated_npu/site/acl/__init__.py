# SPDX-License-Identifier: Apache-2.0
"""The device's runtime. Only one of its functions is emulated."""

from acl import rt as rt
