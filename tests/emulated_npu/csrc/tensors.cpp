// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "tensors.h"

#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/copy.h>

#include <cstring>

namespace emulated_npu {
namespace {

template <typename... Kind>
at::Tensor shaped_like(const at::Tensor& like, c10::Storage storage, c10::DispatchKeySet keys, Kind... kind) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(kind..., std::move(storage), keys, like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

}  // namespace

bool is_npu(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kNpu; }

at::Tensor CpuAliases::of(const at::Tensor& tensor) {
  if (!is_npu(tensor)) return tensor;
  const auto& storage = tensor.storage();
  c10::Storage cpu;
  for (const auto& entry : entries_)
    if (entry.npu.storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) cpu = entry.cpu.storage();
  if (!cpu) cpu = cpu_storage_of(block_of(*storage.unsafeGetStorageImpl()), storage.nbytes());
  entries_.push_back({tensor, shaped_like(tensor, std::move(cpu), c10::DispatchKeySet(c10::DispatchKey::CPU))});
  return entries_.back().cpu;
}

at::Tensor CpuAliases::origin(const at::Tensor& cpu) const {
  for (const auto& entry : entries_)
    if (entry.cpu.storage().unsafeGetStorageImpl() == cpu.storage().unsafeGetStorageImpl()) return entry.npu;
  return {};
}

void CpuAliases::mirror_resized() const {
  for (const auto& [npu, cpu] : entries_) {
    const auto& storage = npu.storage();
    if (storage.nbytes() < cpu.storage().nbytes()) grow_storage(storage, cpu.storage().nbytes());
    if (storage.data() != cpu.storage().data() && cpu.storage().nbytes())
      std::memcpy(storage.mutable_data(), cpu.storage().data(), cpu.storage().nbytes());
    if (npu.sizes() != cpu.sizes() || npu.strides() != cpu.strides())
      npu.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }
}

at::Tensor new_npu_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  auto made = at::detail::empty_strided_generic(sizes, strides, npu_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
  if (auto block = block_of(*made.storage().unsafeGetStorageImpl())) block->holds_floats = c10::isFloatingType(type);
  return made;
}

at::Tensor to_npu_now(const at::Tensor& cpu) {
  const auto dense = cpu.is_non_overlapping_and_dense() ? cpu : cpu.contiguous();
  auto made = new_npu_tensor(dense.sizes(), dense.strides(), dense.scalar_type());
  if (made.nbytes()) std::memcpy(made.mutable_data_ptr(), dense.const_data_ptr(), dense.nbytes());
  if (cpu.is_conj()) made.unsafeGetTensorImpl()->_set_conj(true);
  return made;
}

at::Tensor view_of(const at::Tensor& base, const at::Tensor& like) {
  const auto keys = base.key_set().remove(c10::DispatchKey::Conjugate).remove(c10::DispatchKey::Negative);
  return shaped_like(like, base.storage(), keys, c10::TensorImpl::VIEW);
}

at::Tensor weak_reference(const at::Tensor& tensor) {
  const auto keys = tensor.key_set().remove(c10::DispatchKey::Conjugate).remove(c10::DispatchKey::Negative);
  return shaped_like(tensor, weak_storage_of(tensor.storage()), keys);
}

at::Tensor to_meta(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  c10::DataPtr nothing(nullptr, c10::Device(c10::kMeta));
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(nothing), c10::GetAllocator(c10::kMeta), true);
  return shaped_like(tensor, std::move(storage), c10::DispatchKeySet(c10::DispatchKey::Meta));
}

void copy_bytes(const at::Tensor& to, const at::Tensor& from) {
  const bool is_same = to.dtype() == from.dtype() && to.strides() == from.strides() && to.sizes() == from.sizes();
  if (is_same && to.is_conj() == from.is_conj() && to.is_non_overlapping_and_dense()) {
    if (to.nbytes()) std::memmove(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
  } else {
    to.copy_(from);
  }
}

void enqueue(std::string name, std::function<void()> run) {
  auto& scheduler = Scheduler::get();
  scheduler.enqueue(scheduler.current_stream(current_device()), {std::move(name), std::move(run), nullptr, nullptr});
}

void synchronize_current_stream() {
  auto& scheduler = Scheduler::get();
  scheduler.synchronize(scheduler.current_stream(current_device()));
}

void grow_storage(const c10::Storage& storage, size_t num_bytes) {
  c10::Storage grown(c10::Storage::use_byte_size_t(), num_bytes, npu_allocator(), true);
  const auto old = cpu_storage_of(block_of(*storage.unsafeGetStorageImpl()), storage.nbytes());
  const auto now = cpu_storage_of(block_of(*grown.unsafeGetStorageImpl()), num_bytes);
  // Before the old memory is freed, which poisons it.
  if (old.nbytes()) enqueue("resize", [old, now] { std::memcpy(now.mutable_data(), old.data(), std::min(old.nbytes(), now.nbytes())); });
  storage.set_data_ptr_noswap(grown.set_data_ptr(c10::DataPtr(nullptr, grown.device())));
  storage.set_nbytes(num_bytes);
}

}  // namespace emulated_npu
