// SPDX-License-Identifier: Apache-2.0
// What torch asks of a device: guard, events, hooks.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstring>

#include "memory.h"
#include "streams.h"

namespace emulated_npu {
namespace {

c10::DeviceIndex num_devices = 1;
thread_local c10::DeviceIndex device_of_thread = 0;

EventRef& event_of(void* event) { return *static_cast<EventRef*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNpu; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kNpu, device_of_thread}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) device_of_thread = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices; }

  c10::Stream getStream(c10::Device device) const noexcept override {
    return stream_of(current_stream(), device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(kDefaultStream, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(new_stream(), device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    const auto before = getStream(stream.device());
    set_current_stream(stream.id());
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return query_stream(stream.id()); }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    emulated_npu::record_stream(data.get(), stream.id());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new EventRef(std::make_shared<Event>());
    emulated_npu::record(event_of(*event), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait(event_of(event), stream.id());
  }
  bool queryEvent(void* event) const override { return !event || query_event(event_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize_event(event_of(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventRef*>(event);
  }

 private:
  static c10::Stream stream_of(int64_t id, c10::Device device) {
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { device_of_thread = index; }
  c10::DeviceIndex getCurrentDevice() const override { return device_of_thread; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(device_of_thread, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>(c10::detail::getNonDeterministicRandom());
  }
  at::Device getDeviceFromPtr(void*) const override { return {kNpu, device_of_thread}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    synchronize_stream(current_stream());
    auto data = device_allocator()->allocate(num_bytes);
    if (storage.data() && data.get())
      std::memcpy(data.get(), storage.data(), std::min(num_bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(num_bytes);
  }
};

}  // namespace

c10::DeviceIndex current_device() { return device_of_thread; }

void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < num_devices, "emulated NPU: device ", int{index},
              " does not exist; there are ", int{num_devices});
  device_of_thread = index;
}

c10::DeviceIndex device_count() { return num_devices; }

void start(c10::DeviceIndex count) {
  num_devices = count;
  c10::SetAllocator(kNpu, device_allocator());
  if (!at::isPrivateUse1HooksRegistered()) at::RegisterPrivateUse1HooksInterface(new Hooks());
}

}  // namespace emulated_npu
