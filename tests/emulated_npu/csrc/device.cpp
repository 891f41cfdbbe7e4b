// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "device.h"

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <malloc.h>

#include <cstring>

namespace emulated_npu {
namespace {

int device_count = 1;
thread_local c10::DeviceIndex device_of_thread = 0;

// What an event holds: what it has recorded last.
MarkerPtr& marker_of(void* event) { return *static_cast<MarkerPtr*>(event); }

struct NpuGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNpu; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kNpu, device_of_thread}; }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) device_of_thread = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices(); }

  c10::Stream getStream(c10::Device device) const override { return Scheduler::get().current_stream(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kNpu, index_of(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return Scheduler::get().new_stream({kNpu, index_of(device)});
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return Scheduler::get().exchange_current_stream(stream);
  }
  bool queryStream(const c10::Stream& stream) const override { return Scheduler::get().query(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { Scheduler::get().synchronize(stream); }
  void synchronizeDevice(const c10::DeviceIndex) const override { Scheduler::get().synchronize_device(); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto marker = Scheduler::get().record(stream);
    if (*event) marker_of(*event) = std::move(marker);
    else *event = new MarkerPtr(std::move(marker));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) Scheduler::get().wait(stream, marker_of(event));
  }
  bool queryEvent(void* event) const override { return !event || Scheduler::get().query(marker_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) Scheduler::get().synchronize(marker_of(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<MarkerPtr*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override { return elapsed_ms(first, second); }

 private:
  static c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : device_of_thread; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, NpuGuard)

struct NpuHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices(); }
  c10::DeviceIndex getCurrentDevice() const override { return device_of_thread; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = device_of_thread;
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? device_of_thread : exchangeDevice(index);
  }

  // Random numbers are those of the host's generator: a seed gives the same on both.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }

  at::Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(is_on_npu(data, 1), "an address that is not of the emulated NPU");
    return {kNpu, device_of_thread};
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    auto data = npu_allocator()->allocate(num_bytes);
    const auto num_kept = std::min(num_bytes, storage.nbytes());
    if (num_kept) npu_allocator()->copy_data(data.get(), storage.data(), num_kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(num_bytes);
  }
};

}  // namespace

c10::DeviceIndex current_device() { return device_of_thread; }

void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count, "npu: invalid device ordinal ", static_cast<int>(index), ", there are ", device_count);
  device_of_thread = index;
}

double elapsed_ms(void* first, void* second) {
  TORCH_CHECK(first && second && marker_of(first)->is_reached && marker_of(second)->is_reached,
              "npu: elapsed_time of events that have not passed (emulated)");
  return (marker_of(second)->time_s - marker_of(first)->time_s) * 1000;
}

c10::DeviceIndex num_devices() { return static_cast<c10::DeviceIndex>(device_count); }

void start(int count) {
  // Activations come and go at every step: the host is to keep their pages.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
  device_count = count;
  c10::SetAllocator(kNpu, npu_allocator());
  if (!at::isPrivateUse1HooksRegistered()) at::RegisterPrivateUse1HooksInterface(new NpuHooks);
}

}  // namespace emulated_npu
