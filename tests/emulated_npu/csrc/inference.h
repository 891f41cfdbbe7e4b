// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// What an operator will return, from shapes alone.
#pragma once

#include "arguments.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace emulated_npu {

struct Inferred {
  bool is_known = false;  // if not, it depends on values, or torch cannot tell
  Stack returned;         // meta tensors
  // By tensor among the arguments: its size afterwards, if that is another one.
  std::vector<std::optional<std::vector<int64_t>>> resized;
};

// Valid until the next call of this thread.
const Inferred& infer(const c10::OperatorHandle& op, int generator, const Stack& arguments);

}  // namespace emulated_npu
