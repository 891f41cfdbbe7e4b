// SPDX-License-Identifier: Apache-2.0
// The device type `npu` as torch knows it: guard, hooks, how many there are.
#pragma once

#include "streams.h"

namespace emulated_npu {

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
c10::DeviceIndex num_devices();

// Makes torch know the device; once.
void start(int num_devices);

}  // namespace emulated_npu
