// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace kvext::retention {

/// Adds `RetainedCache` and `RetainedRequest`, described in vllm_ascend_kvext/_native.pyi.
void bind(nanobind::module_& module);

}  // namespace kvext::retention
