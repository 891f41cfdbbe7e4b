// SPDX-License-Identifier: Apache-2.0
// Which device the calling thread is on.
#pragma once

#include <c10/core/Device.h>

namespace emulated_npu {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

c10::DeviceIndex current_device();
// Raises: there is no such device.
void set_current_device(c10::DeviceIndex index);
c10::DeviceIndex device_count();

// Make torch know the device. Once per process.
void start(c10::DeviceIndex num_devices);

}  // namespace emulated_npu
