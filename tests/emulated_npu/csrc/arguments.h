// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Arguments of an operator, as the dispatcher hands them over.
#pragma once

#include "streams.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

namespace emulated_npu {

using torch::jit::Stack;

// The argument with other tensors in the place of its own.
template <typename Function>
c10::IValue with_tensors(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(function(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) list.push_back(tensor ? std::optional(function(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

inline c10::IValue on_device(const c10::IValue& value, c10::DeviceType type) {
  if (value.isDevice() && value.toDevice().type() == kNpu) return c10::Device(type);
  return value;
}

}  // namespace emulated_npu
