// SPDX-License-Identifier: Apache-2.0
// One memory under two names: a tensor of the device, and the same as a tensor of the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace emulated_npu {

// The CPU tensors that stand for the device tensors of one call which runs at once.
class Aliases {
 public:
  // The same memory, sizes and strides on the CPU; what is not on the device is returned as it is.
  at::Tensor cpu(const at::Tensor& tensor);
  // A result of the call: a view of an argument if it shares its storage, else adopted as new.
  at::Tensor device(const at::Tensor& tensor) const;
  // Give the device tensors what an operator has changed: memory, size, strides.
  void mirror() const;

 private:
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;  // device, CPU
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;       // device, CPU
};

// The same memory on the CPU for work in flight on `stream`: it keeps the memory, not the tensor. The
// host may free the tensor meanwhile.
at::Tensor alias_for_work(const at::Tensor& tensor, int64_t stream);

at::Tensor empty_on_device(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype);

}  // namespace emulated_npu
