// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "launcher.h"

#include "acl/acl.h"
// ascendc_library() generates this header, named after the kernel.
#include "aclrtlaunch_kvext_page_transfer.h"
#include "work_table.h"

void kvext_ascend_limits(KernelLimits* limits) {
  *limits = {kvext::kTileBytes, kvext::kDataBlockBytes, kvext::kMaxRunsPerUnit};
}

int32_t kvext_ascend_num_cores(int64_t* num_cores) {
  int32_t device = 0;
  const aclError error = aclrtGetDevice(&device);
  if (error != ACL_SUCCESS) {
    return error;
  }
  return aclrtGetDeviceInfo(static_cast<uint32_t>(device), ACL_DEV_ATTR_VECTOR_CORE_NUM,
                            num_cores);
}

int32_t kvext_ascend_map_host(void* address, uint64_t num_bytes, void** device_address) {
  return aclrtHostRegister(address, num_bytes, ACL_HOST_REGISTER_MAPPED, device_address);
}

int32_t kvext_ascend_unmap_host(void* address) { return aclrtHostUnregister(address); }

int32_t kvext_ascend_page_transfer(uint32_t num_cores, void* stream, void* table) {
  return static_cast<int32_t>(
      ACLRT_LAUNCH_KERNEL(kvext_page_transfer)(num_cores, stream, table));
}
