// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// The same bytes as a tensor on npu and as a tensor on the CPU.
#pragma once

#include "memory.h"

#include <ATen/core/Tensor.h>

namespace emulated_npu {

// CPU tensors on the bytes of npu tensors, which share a storage where those do. They keep the
// bytes, but not the npu tensors: dropping those on the host stays visible to the allocator.
class CpuAliases {
 public:
  at::Tensor of(const at::Tensor& tensor);

  // The npu tensor that has this storage under its other name; an undefined one if none has.
  at::Tensor origin(const at::Tensor& cpu) const;

  // Gives npu tensors the sizes, and the larger memory, that an operator has given their aliases.
  void mirror_resized() const;

 private:
  struct Entry {
    at::Tensor npu;
    at::Tensor cpu;
  };
  std::vector<Entry> entries_;
};

bool is_npu(const at::Tensor& tensor);

// A new tensor on npu, not poisoned: for what an operator will write whole.
at::Tensor new_npu_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type);

// A new tensor on npu with the content of a tensor on the CPU.
at::Tensor to_npu_now(const at::Tensor& cpu);

// A tensor with another's storage and keys: what is made outside of inference mode stays normal.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& like);

// The same tensor, which does not keep its memory: torch_npu's reference for what a graph has.
at::Tensor weak_reference(const at::Tensor& tensor);

// A tensor without bytes, for kernels that know shapes only.
at::Tensor to_meta(const at::Tensor& tensor);

// Copies on the host, between tensors of the CPU with the same shape.
void copy_bytes(const at::Tensor& to, const at::Tensor& from);

// Enqueues on the stream that is current for the device of the thread.
void enqueue(std::string name, std::function<void()> run);
void synchronize_current_stream();

void grow_storage(const c10::Storage& storage, size_t num_bytes);

}  // namespace emulated_npu
