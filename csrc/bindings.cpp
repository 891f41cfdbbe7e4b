// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// The module vllm_ascend_kvext._native. Tables come in through the buffer protocol, so the build
// needs neither numpy nor torch.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <sched.h>

#include <string>
#include <vector>

#include "cpu/copy_kernels.h"
#include "cpu/cpu_features.h"
#include "kvext/checked_transfer.h"
#include "kvext/copies.h"
#include "kvext/page_transfer.h"
#include "kvext/rotation.h"

namespace nb = nanobind;

namespace kvext::retention {

void bind(nb::module_& module);  // retention/bindings.cpp

}  // namespace kvext::retention

namespace {

constexpr int kMaxThreads = 256;

// Holds a buffer of the caller for as long as this object lives.
class HeldBuffer {
 public:
  HeldBuffer(const HeldBuffer&) = delete;
  HeldBuffer& operator=(const HeldBuffer&) = delete;

 protected:
  HeldBuffer() = default;
  ~HeldBuffer() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }

  // Returns whether the object has a buffer.
  bool take(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_RECORDS_RO) == 0) return true;
    PyErr_Clear();
    return false;
  }

  std::string format() const { return view_.format == nullptr ? "B" : view_.format; }
  bool is_contiguous() const { return PyBuffer_IsContiguous(&view_, 'C') != 0; }
  bool is_aligned(size_t num_bytes) const {
    return reinterpret_cast<uintptr_t>(view_.buf) % num_bytes == 0;
  }

  Py_buffer view_{};
};

constexpr const char* kNoBuffer = "an object without a buffer";

// A table: rows of int64.
template <typename Row>
class HeldTable : HeldBuffer {
 public:
  HeldTable(nb::handle object, const char* name) {
    if (!take(object)) refuse(name, kNoBuffer);
    const bool is_table = (format() == "l" || format() == "q") &&
                          view_.itemsize == sizeof(int64_t) && view_.ndim == 2 &&
                          view_.shape[1] == Row::kColumns && is_contiguous() &&
                          is_aligned(alignof(int64_t));
    if (!is_table) refuse(name, words());
  }

  kvext::Table<Row> table() const {
    return {static_cast<const Row*>(view_.buf), static_cast<int64_t>(view_.shape[0])};
  }

 private:
  std::string words() const {
    std::string shape;
    for (int i = 0; i < view_.ndim; ++i) {
      shape += (i > 0 ? ", " : "") + std::to_string(view_.shape[i]);
    }
    return "format '" + format() + "', shape [" + shape + "], " +
           (is_contiguous() ? "contiguous" : "not contiguous");
  }

  [[noreturn]] static void refuse(const char* name, const std::string& found) {
    throw kvext::DescriptorError(std::string(name) + ": expected int64, shape [rows, " +
                                 std::to_string(Row::kColumns) + "], C-contiguous, found " + found +
                                 ". Build it with numpy.ascontiguousarray(rows, numpy.int64).");
  }
};

// The arguments of a transfer.
class HeldTransfer {
 public:
  HeldTransfer(nb::handle pools, int64_t host_address, int64_t host_bytes, nb::handle planes,
               nb::handle runs, int64_t direction)
      : pools_(pools, "pools"), planes_(planes, "planes"), runs_(runs, "runs") {
    if (direction != 0 && direction != 1) {
      throw kvext::DescriptorError("direction: expected 0 (pages to host) or 1 (host to pages), "
                                   "found " + std::to_string(direction) + ". Pass a Direction.");
    }
    transfer_ = {pools_.table(), planes_.table(), runs_.table(), host_address, host_bytes,
                 static_cast<kvext::Direction>(direction)};
  }

  const kvext::Transfer& transfer() const { return transfer_; }

 private:
  HeldTable<kvext::Pool> pools_;
  HeldTable<kvext::Plane> planes_;
  HeldTable<kvext::Run> runs_;
  kvext::Transfer transfer_;
};

class HeldFrequencies : HeldBuffer {
 public:
  explicit HeldFrequencies(nb::handle object) {
    if (!take(object)) refuse(kNoBuffer);
    if (format() != "d" || view_.ndim != 1 || !is_contiguous() || !is_aligned(alignof(double))) {
      refuse("format '" + format() + "', " + std::to_string(view_.ndim) + " dimensions");
    }
  }

  const double* values() const { return static_cast<const double*>(view_.buf); }
  int64_t size() const { return static_cast<int64_t>(view_.shape[0]); }

 private:
  [[noreturn]] static void refuse(const std::string& found) {
    throw kvext::DescriptorError(
        "frequencies: expected float64, one dimension, contiguous, found " + found +
        ". Build it with numpy.ascontiguousarray(frequencies, numpy.float64).");
  }
};

[[noreturn]] void refuse_option(const std::string& message) {
  throw nb::value_error(message.c_str());
}

kvext::Placement checked_placement(const std::vector<int>& cpus, int64_t niceness) {
  for (size_t i = 0; i < cpus.size(); ++i) {
    if (cpus[i] < 0 || cpus[i] >= CPU_SETSIZE) {
      refuse_option("cpus: expected 0 to " + std::to_string(CPU_SETSIZE - 1) + ", found " +
                    std::to_string(cpus[i]) + ".");
    }
    if (i > 0 && cpus[i] <= cpus[i - 1]) {
      refuse_option("cpus: expected ascending numbers, found " + std::to_string(cpus[i]) +
                    " behind " + std::to_string(cpus[i - 1]) + ".");
    }
  }
  if (niceness < 0 || niceness > 19) {
    refuse_option("niceness: expected 0 to 19, found " + std::to_string(niceness) + ".");
  }
  return {cpus, static_cast<int>(niceness)};
}

kvext::CopyOptions checked_options(int64_t num_threads, int64_t streaming,
                                   const std::vector<int>& cpus, int64_t niceness) {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    refuse_option("num_threads: expected 1 to " + std::to_string(kMaxThreads) + ", found " +
                  std::to_string(num_threads) + ".");
  }
  if (streaming < -1 || streaming > 1) {
    refuse_option("streaming: expected -1 (auto), 0 or 1, found " + std::to_string(streaming) +
                  ".");
  }
  return {static_cast<int>(num_threads), static_cast<kvext::Streaming>(streaming),
          checked_placement(cpus, niceness)};
}

nb::tuple validate(nb::handle pools, int64_t host_address, int64_t host_bytes, nb::handle planes,
                   nb::handle runs, int64_t direction) {
  const HeldTransfer held(pools, host_address, host_bytes, planes, runs, direction);
  int64_t num_bytes, num_plane_runs;
  {
    const nb::gil_scoped_release released;
    const kvext::CheckedTransfer checked(held.transfer());
    num_bytes = checked.num_bytes();
    num_plane_runs = checked.num_plane_runs();
  }
  return nb::make_tuple(num_bytes, num_plane_runs);
}

void page_transfer(nb::handle pools, int64_t host_address, int64_t host_bytes, nb::handle planes,
                   nb::handle runs, int64_t direction, int64_t num_threads, int64_t streaming,
                   const std::vector<int>& cpus, int64_t niceness) {
  const HeldTransfer held(pools, host_address, host_bytes, planes, runs, direction);
  const kvext::CopyOptions options = checked_options(num_threads, streaming, cpus, niceness);
  const nb::gil_scoped_release released;
  kvext::page_transfer(kvext::CheckedTransfer(held.transfer()), options);
}

void rotated_page_transfer(nb::handle pools, int64_t host_address, int64_t host_bytes,
                           nb::handle planes, nb::handle runs, int64_t direction,
                           nb::handle rotations, nb::handle shifts, nb::handle frequencies,
                           int64_t num_threads, int64_t streaming, const std::vector<int>& cpus,
                           int64_t niceness) {
  const HeldTransfer held(pools, host_address, host_bytes, planes, runs, direction);
  const HeldTable<kvext::Rotation> held_rotations(rotations, "rotations");
  const HeldTable<kvext::Shift> held_shifts(shifts, "shifts");
  const HeldFrequencies held_frequencies(frequencies);
  const kvext::CopyOptions options = checked_options(num_threads, streaming, cpus, niceness);
  const nb::gil_scoped_release released;
  const kvext::CheckedTransfer checked(held.transfer());
  kvext::rotated_page_transfer(
      kvext::CheckedRotation(checked, {held_rotations.table(), held_shifts.table(),
                                       held_frequencies.values(), held_frequencies.size()}),
      options);
}

using Column = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;

Column as_array(std::vector<int64_t>&& values) {
  auto* owned = new std::vector<int64_t>(std::move(values));
  const nb::capsule owner(owned, [](void* pointer) noexcept {
    delete static_cast<std::vector<int64_t>*>(pointer);
  });
  return Column(owned->data(), {owned->size()}, owner);
}

nb::tuple expand(nb::handle pools, int64_t host_address, int64_t host_bytes, nb::handle planes,
                 nb::handle runs, int64_t direction) {
  const HeldTransfer held(pools, host_address, host_bytes, planes, runs, direction);
  std::vector<int64_t> sources, destinations, sizes;
  {
    const nb::gil_scoped_release released;
    const kvext::CheckedTransfer checked(held.transfer());
    kvext::for_each_copy(checked, 0, checked.num_bytes(), [&](const kvext::Copy& copy) {
      sources.push_back(copy.source);
      destinations.push_back(copy.destination);
      sizes.push_back(copy.num_bytes);
    });
  }
  return nb::make_tuple(as_array(std::move(sources)), as_array(std::move(destinations)),
                        as_array(std::move(sizes)));
}

void copy(int64_t destination, int64_t source, int64_t num_bytes, int64_t num_threads,
          int64_t streaming, const std::vector<int>& cpus, int64_t niceness) {
  const kvext::CopyOptions options = checked_options(num_threads, streaming, cpus, niceness);
  const nb::gil_scoped_release released;
  kvext::copy(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source),
              num_bytes, options);
}

void require_cpus(const std::vector<int>& cpus, int64_t niceness) {
  const kvext::Placement placement = checked_placement(cpus, niceness);
  if (placement.cpus.empty()) refuse_option("cpus: expected at least one, found none.");
  const nb::gil_scoped_release released;
  kvext::require_cpus(placement);
}

nb::dict describe() {
  std::vector<std::string> instruction_sets;
  for (const kvext::CopyKernel& kernel : kvext::copy_kernels()) {
    instruction_sets.push_back(kernel.name);
  }
  std::vector<std::string> rotation_kernels;
  for (const kvext::RotationKernel& kernel : kvext::rotation_kernels()) {
    rotation_kernels.push_back(kernel.name);
  }
  nb::dict described;
  described["version"] = KVEXT_VERSION;
  described["kernel"] = instruction_sets.front();
  described["instruction_sets"] = instruction_sets;
  described["rotation_kernel"] = rotation_kernels.front();
  described["rotation_kernels"] = rotation_kernels;
  described["cpu_features"] = kvext::names_of(kvext::read_cpu_features());
  return described;
}

}  // namespace

NB_MODULE(_native, module) {
  // An engine in the user's own process may live until the interpreter ends. That is no leak.
  nb::set_leak_warnings(false);
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const kvext::DescriptorError& error) {
      const nb::object type =
          nb::module_::import_("vllm_ascend_kvext.transfer.errors").attr("DescriptorError");
      PyErr_SetString(type.ptr(), error.what());
    }
  });
  // vllm_ascend_kvext/_native.pyi documents each function.
  using nb::literals::operator""_a;
  // Accept None here: the functions refuse it, as they refuse any object without a buffer.
  const auto pools = "pools"_a.none(), planes = "planes"_a.none(), runs = "runs"_a.none();
  module.def("validate", &validate, pools, "host_address"_a, "host_bytes"_a, planes, runs,
             "direction"_a);
  module.def("page_transfer", &page_transfer, pools, "host_address"_a, "host_bytes"_a, planes, runs,
             "direction"_a, "num_threads"_a = 1, "streaming"_a = -1, "cpus"_a = nb::tuple(),
             "niceness"_a = 0);
  module.def("rotated_page_transfer", &rotated_page_transfer, pools, "host_address"_a,
             "host_bytes"_a, planes, runs, "direction"_a, "rotations"_a.none(), "shifts"_a.none(),
             "frequencies"_a.none(), "num_threads"_a = 1, "streaming"_a = -1,
             "cpus"_a = nb::tuple(), "niceness"_a = 0);
  module.def("expand", &expand, pools, "host_address"_a, "host_bytes"_a, planes, runs,
             "direction"_a);
  module.def("copy", &copy, "destination"_a, "source"_a, "num_bytes"_a, "num_threads"_a = 1,
             "streaming"_a = -1, "cpus"_a = nb::tuple(), "niceness"_a = 0);
  module.def("require_cpus", &require_cpus, "cpus"_a, "niceness"_a = 0);
  module.def("describe", &describe);
  kvext::retention::bind(module);
}
