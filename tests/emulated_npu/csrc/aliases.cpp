// SPDX-License-Identifier: Apache-2.0
#include "aliases.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include "device.h"
#include "memory.h"

namespace emulated_npu {
namespace {

template <typename Owner>
void drop(void* owner) {
  delete static_cast<Owner*>(owner);
}

// Storage of the same memory under another device, which keeps `owner` as long as it lives.
template <typename Owner>
c10::Storage same_memory(const c10::Storage& storage, c10::Device device, c10::Allocator* allocator,
                         Owner* owner) {
  c10::DataPtr data(storage.mutable_data(), owner, &drop<Owner>, device);
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), allocator,
                      /*resizable=*/true);
}

void copy_geometry(const at::Tensor& from, c10::TensorImpl* to) {
  to->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  if (from.is_conj()) to->_set_conj(true);
  if (from.is_neg()) to->_set_neg(true);
}

at::Tensor with_storage(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                       like.dtype());
  copy_geometry(like, made.unsafeGetTensorImpl());
  return made;
}

// Views have the dispatch keys of what they are made of: a tensor of inference mode stays one.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& like) {
  const auto keys =
      base.key_set().remove(c10::DispatchKey::Conjugate).remove(c10::DispatchKey::Negative);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), keys, like.dtype());
  copy_geometry(like, made.unsafeGetTensorImpl());
  return made;
}

bool is_same(const c10::Storage& a, const c10::Storage& b) {
  return a.unsafeGetStorageImpl() == b.unsafeGetStorageImpl();
}

struct KeptForWork {
  std::unique_ptr<Use> use;  // Of an allocation of the device,
  c10::Storage storage;      // or of memory that an operator of the CPU has allocated.
};

}  // namespace

at::Tensor Aliases::cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kNpu) return tensor;
  for (const auto& [device, cpu] : storages_)
    if (is_same(device, tensor.storage())) {
      tensors_.emplace_back(tensor, with_storage(tensor, cpu, c10::DispatchKey::CPU));
      return tensors_.back().second;
    }
  auto storage = same_memory(tensor.storage(), c10::Device(c10::kCPU), c10::GetCPUAllocator(),
                             new c10::Storage(tensor.storage()));
  storages_.emplace_back(tensor.storage(), storage);
  tensors_.emplace_back(tensor, with_storage(tensor, storage, c10::DispatchKey::CPU));
  return tensors_.back().second;
}

at::Tensor Aliases::device(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
  for (const auto& [device, cpu] : tensors_)
    if (is_same(cpu.storage(), tensor.storage())) return view_of(device, tensor);
  auto storage = same_memory(tensor.storage(), c10::Device(kNpu, current_device()),
                             device_allocator(), new c10::Storage(tensor.storage()));
  return with_storage(tensor, std::move(storage), c10::DispatchKey::PrivateUse1);
}

void Aliases::mirror() const {
  for (const auto& [device, cpu] : storages_) {
    if (device.data() == cpu.data() && device.nbytes() == cpu.nbytes()) continue;
    c10::DataPtr data(cpu.mutable_data(), new c10::Storage(cpu), &drop<c10::Storage>,
                      c10::Device(kNpu, current_device()));
    device.set_data_ptr_noswap(std::move(data));
    device.set_nbytes(cpu.nbytes());
  }
  for (const auto& [device, cpu] : tensors_)
    if (device.sizes() != cpu.sizes() || device.strides() != cpu.strides() ||
        device.storage_offset() != cpu.storage_offset())
      device.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(),
                                                          cpu.storage_offset());
}

at::Tensor alias_for_work(const at::Tensor& tensor, int64_t stream) {
  auto kept = std::make_unique<KeptForWork>();
  if (auto block = find_block(tensor.storage().data()))
    kept->use = std::make_unique<Use>(std::move(block), stream);
  else
    kept->storage = tensor.storage();
  auto storage = same_memory(tensor.storage(), c10::Device(c10::kCPU), c10::GetCPUAllocator(),
                             kept.release());
  return with_storage(tensor, std::move(storage), c10::DispatchKey::CPU);
}

at::Tensor empty_on_device(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

}  // namespace emulated_npu
