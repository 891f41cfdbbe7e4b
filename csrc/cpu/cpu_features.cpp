// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace kvext {

#if defined(__x86_64__)

namespace {

// Intel's manual, volume 2, "CPUID": leaf 1, ecx.
constexpr uint32_t kFma = 1u << 12;
constexpr uint32_t kOsxsave = 1u << 27;
// Leaf 7, subleaf 0, ebx.
constexpr uint32_t kAvx2 = 1u << 5;
constexpr uint32_t kAvx512f = 1u << 16;
constexpr uint32_t kAvx512dq = 1u << 17;
constexpr uint32_t kAvx512bw = 1u << 30;
constexpr uint32_t kAvx512vl = 1u << 31;
// XCR0, volume 1, chapter 13: the registers that the kernel saves.
constexpr uint32_t kYmmState = 0x06;
constexpr uint32_t kZmmState = 0xE6;

// Leaf 0 of AMD: "AuthenticAMD" in ebx, edx, ecx.
constexpr uint32_t kAmdEbx = 0x68747541;
constexpr uint32_t kAmdEdx = 0x69746E65;
constexpr uint32_t kAmdEcx = 0x444D4163;

struct Leaf {
  uint32_t eax = 0;
  uint32_t ebx = 0;
  uint32_t ecx = 0;
  uint32_t edx = 0;
};

// All zero if the CPU does not have the leaf.
Leaf leaf_of(uint32_t number) {
  Leaf leaf;
  __get_cpuid_count(number, 0, &leaf.eax, &leaf.ebx, &leaf.ecx, &leaf.edx);
  return leaf;
}

// The compiler's intrinsic would need the whole file to be compiled for CPUs that have it.
uint32_t saved_state() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

}  // namespace

CpuFeatures read_cpu_features() {
  CpuFeatures features;
  const Leaf vendor = leaf_of(0);
  features.is_amd =
      vendor.ebx == kAmdEbx && vendor.edx == kAmdEdx && vendor.ecx == kAmdEcx;
  const Leaf first = leaf_of(1);
  const uint32_t state = (first.ecx & kOsxsave) != 0 ? saved_state() : 0;
  const Leaf seventh = leaf_of(7);
  if ((state & kYmmState) == kYmmState) {
    features.has_fma = (first.ecx & kFma) != 0;
    features.has_avx2 = (seventh.ebx & kAvx2) != 0;
  }
  if ((state & kZmmState) == kZmmState) {
    features.has_avx512f = (seventh.ebx & kAvx512f) != 0;
    features.has_avx512dq = (seventh.ebx & kAvx512dq) != 0;
    features.has_avx512bw = (seventh.ebx & kAvx512bw) != 0;
    features.has_avx512vl = (seventh.ebx & kAvx512vl) != 0;
  }
  return features;
}

#elif defined(__aarch64__)

CpuFeatures read_cpu_features() {
  // Linux, arch/arm64/include/uapi/asm/hwcap.h. The C library of an old system lacks the names.
  constexpr unsigned long kAsimd = 1ul << 1;
  constexpr unsigned long kSve = 1ul << 22;
  CpuFeatures features;
  const unsigned long found = getauxval(AT_HWCAP);
  features.has_asimd = (found & kAsimd) != 0;
  features.has_sve = (found & kSve) != 0;
  return features;
}

#else

CpuFeatures read_cpu_features() { return {}; }

#endif

std::vector<std::string> names_of(const CpuFeatures& features) {
  std::vector<std::string> names;
  const auto add = [&names](bool has_it, const char* name) {
    if (has_it) names.emplace_back(name);
  };
  add(features.has_avx2, "avx2");
  add(features.has_fma, "fma");
  add(features.has_avx512f, "avx512f");
  add(features.has_avx512bw, "avx512bw");
  add(features.has_avx512vl, "avx512vl");
  add(features.has_avx512dq, "avx512dq");
  add(features.has_asimd, "asimd");
  add(features.has_sve, "sve");
  return names;
}

}  // namespace kvext
