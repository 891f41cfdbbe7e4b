// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// CMake tries to compile this file: CANN 8.1.RC1 does not have aclrtGetDeviceInfo.
#include "acl/acl.h"

aclError vector_cores(int64_t* num_cores) {
  return aclrtGetDeviceInfo(0, ACL_DEV_ATTR_VECTOR_CORE_NUM, num_cores);
}
