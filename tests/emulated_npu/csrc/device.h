// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// The device type `npu` as torch knows it: guard, hooks, how many there are.
#pragma once

#include "streams.h"

#include <optional>

namespace emulated_npu {

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
c10::DeviceIndex num_devices();

// Makes a device the current one while it lives; nothing if there is none, or none of its own.
class OnDevice {
 public:
  explicit OnDevice(std::optional<c10::Device> device) : before_(current_device()) {
    if (device && device->has_index()) set_current_device(device->index());
  }
  ~OnDevice() { set_current_device(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  c10::DeviceIndex before_;
};

// Between two events, as torch has them. Raises: one of them has not passed.
double elapsed_ms(void* first, void* second);

// Makes torch know the device; once.
void start(int num_devices);

}  // namespace emulated_npu
