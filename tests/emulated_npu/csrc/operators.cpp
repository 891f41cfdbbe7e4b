// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Operators with a kernel of their own for npu: memory, copies between devices, frequent views.
#include "device.h"
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace emulated_npu {
namespace {

// Fresh memory holds what somebody has left there.
at::Tensor poisoned(at::Tensor made) {
  auto block = block_of(*made.storage().unsafeGetStorageImpl());
  if (!block) return made;
  block->holds_floats = made.is_floating_point() || made.is_complex();
  Task poison{"poison of fresh memory", [block] { block->poison(); }, nullptr, nullptr};
  if (block->graph) Scheduler::get().enqueue(block->stream, std::move(poison));
  else if (Scheduler::get().is_late()) Scheduler::get().append(block->stream, std::move(poison));
  return made;
}

at::Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                               std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice on(device);
  return poisoned(at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), npu_allocator(),
                                            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type), format));
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  OnDevice on(device);
  return poisoned(at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), npu_allocator(),
                                                    c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type)));
}

// torch_npu allocates what these fill without asking whether it is to be pinned; `empty` refuses it.
at::Tensor filled(c10::SymIntArrayRef size, double value, std::optional<at::ScalarType> type, std::optional<at::Device> device) {
  return empty_memory_format(size, type, std::nullopt, device, false, std::nullopt).fill_(value);
}

at::Tensor zeros(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool>) {
  return filled(size, 0, type, device);
}

at::Tensor ones(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<at::Device> device,
                std::optional<bool>) {
  return filled(size, 1, type, device);
}

// ------------------------------------------------------------------ copies

void enqueue_copy(const char* name, at::Tensor to, at::Tensor from) {
  enqueue(name, [to = std::move(to), from = std::move(from)] { to.copy_(from); });
}

// Pinned memory is read and written when the copy runs, other memory of the host at the call. Types
// are converted before bytes move, so those of the host are taken at the call as well.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView guard;
  OnDevice on(is_npu(to) ? to.device() : from.device());
  CpuAliases aliases;
  auto& scheduler = Scheduler::get();
  const bool is_captured = scheduler.recorder_of(scheduler.current_stream(current_device())) != nullptr;
  const bool is_late = scheduler.is_late() || is_captured;
  if (is_npu(from) && is_npu(to)) {
    enqueue_copy("copy on the device", aliases.of(to), aliases.of(from));
  } else if (is_npu(to)) {
    const bool is_direct = is_pinned(from.const_data_ptr()) && from.dtype() == to.dtype() && from.is_contiguous();
    if (is_captured && !is_direct && from.dim()) synchronize_current_stream();  // which is refused
    const bool is_kept = !is_late || !non_blocking || is_direct;
    enqueue_copy("copy to the device", aliases.of(to), is_kept ? from : from.clone());
    if (!non_blocking) synchronize_current_stream();
  } else {
    enqueue_copy("copy to the host", to, aliases.of(from));
    if (!non_blocking || !is_pinned(to.const_data_ptr())) synchronize_current_stream();
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// ------------------------------------------------------------------ storages

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes) return self;
  auto* impl = self.unsafeGetTensorImpl();
  const auto num_bytes = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
  if (num_bytes > self.storage().nbytes()) grow_storage(self.storage(), num_bytes);
  impl->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor& set_source_storage_offset(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                                      c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !sizes.empty()) {
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  }
  return self;
}

at::Tensor& set_source_storage(at::Tensor& self, at::Storage source) {
  const c10::SymInt length(static_cast<int64_t>(source.nbytes() / self.itemsize()));
  return set_source_storage_offset(self, std::move(source), 0, {length}, {});
}

at::Tensor& set_source_tensor(at::Tensor& self, const at::Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

at::Tensor& set_none(at::Tensor& self) {
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, npu_allocator(), true);
  return set_source_storage_offset(self, std::move(nothing), 0, {c10::SymInt(0)}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  auto block = block_of(*self.storage().unsafeGetStorageImpl());
  if (!block || block->stream == stream) return;
  std::lock_guard lock(block->mutex);
  block->used_on.push_back(stream);
}

}  // namespace
}  // namespace emulated_npu

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace emulated_npu;
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("zeros", &zeros);
  m.impl("ones", &ones);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &emulated_npu::resize);
  m.impl("set_.source_Storage_storage_offset", &set_source_storage_offset);
  m.impl("set_.source_Storage", &set_source_storage);
  m.impl("set_.source_Tensor", &set_source_tensor);
  m.impl("set_", &set_none);
  m.impl("record_stream", &record_stream);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
}
