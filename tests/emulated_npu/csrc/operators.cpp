// SPDX-License-Identifier: Apache-2.0
// Operators that the device has of its own: allocation, copies between devices, storage.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "aliases.h"
#include "device.h"
#include "memory.h"
#include "streams.h"

namespace emulated_npu {
namespace {

// Makes the device of a call the current one, as long as it lives.
class OnDevice {
 public:
  explicit OnDevice(std::optional<at::Device> device) : before_(current_device()) {
    if (device && device->index() >= 0) set_current_device(device->index());
  }
  ~OnDevice() { set_current_device(before_); }

 private:
  c10::DeviceIndex before_;
};

at::Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout>, std::optional<at::Device> device,
                               std::optional<bool> pin_memory,
                               std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(!pin_memory.value_or(false), "emulated NPU: only tensors of the CPU can be pinned");
  OnDevice on(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  OnDevice on(device);
  return empty_on_device(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                         c10::dtype_or_default(dtype));
}

bool is_on_device(const at::Tensor& tensor) { return tensor.device().type() == kNpu; }

// What the work of a copy reads or writes, kept until it has run.
at::Tensor end_of_copy(const at::Tensor& tensor, int64_t stream) {
  return is_on_device(tensor) ? alias_for_work(tensor, stream) : tensor;
}

// A copy whose host side is pinned is asynchronous: it reads, or writes, host memory when it runs.
// Pageable memory is read at the call. All other copies have the host wait.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const auto stream = current_stream();
  const auto& host = is_on_device(self) ? to : self;
  const bool is_within_device = is_on_device(self) && is_on_device(to);
  const bool is_pinned_host = !is_within_device && is_pinned(host.storage().data());
  const bool is_to_device = is_on_device(to);
  const bool has_to_wait =
      !is_within_device && !(non_blocking && (is_to_device || is_pinned_host));
  auto source = end_of_copy(self, stream);
  if (is_late() && !is_within_device && is_to_device && !is_pinned_host) source = source.clone();
  enqueue(stream, "copy", [source, target = end_of_copy(to, stream)] {
    at::AutoDispatchBelowADInplaceOrView guard;
    target.copy_(source);
  });
  if (has_to_wait) synchronize_stream(stream);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Tensor& set_source_storage_offset(at::Tensor& self, at::Storage source, c10::SymInt offset,
                                      c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
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

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage empty(c10::Storage::use_byte_size_t(), 0, device_allocator(), /*resizable=*/true);
  return set_source_storage_offset(self, std::move(empty), 0, {c10::SymInt(0)}, {});
}

void record_stream_of(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data(), stream.id());
}

}  // namespace
}  // namespace emulated_npu

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace emulated_npu;
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("set_.source_Storage_storage_offset", &set_source_storage_offset);
  m.impl("set_.source_Storage", &set_source_storage);
  m.impl("set_.source_Tensor", &set_source_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream_of);
}
