// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// What this CPU can do, asked of the CPU and the kernel. The compiler's own answer is not used: its
// library is not linked by every compiler, and without it no feature is ever found.
#pragma once

#include <string>
#include <vector>

namespace kvext {

struct CpuFeatures {
  // On x86-64, a feature counts only if the kernel saves the registers that it needs.
  bool has_avx2 = false;
  bool has_fma = false;
  bool has_avx512f = false;
  bool has_avx512bw = false;
  bool has_avx512vl = false;
  bool has_avx512dq = false;
  bool is_amd = false;
  // On aarch64.
  bool has_asimd = false;
  bool has_sve = false;
};

// The function is cheap, and may be called before main.
CpuFeatures read_cpu_features();

// The names of the features that the CPU has, spelled as in /proc/cpuinfo.
std::vector<std::string> names_of(const CpuFeatures& features);

}  // namespace kvext
