// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "inference.h"

#include "tensors.h"

#include <unordered_map>

namespace emulated_npu {
namespace {

// Many kernels for meta tensors are Python code, and take longer than all else: a model's steps ask
// for the same again and again.
constexpr size_t kMaxKnown = 1 << 16;

class Signature {
 public:
  template <typename Value>
  void add(Value value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  void add(const at::Tensor& tensor) {
    add(tensor.defined());
    if (!tensor.defined()) return;
    const auto* impl = tensor.unsafeGetTensorImpl();
    add(tensor.device().type());
    add(tensor.scalar_type());
    add(static_cast<int>(impl->is_wrapped_number()) + 2 * static_cast<int>(tensor.is_conj()));
    add(tensor.sizes());
    add(tensor.strides());
  }

  // False: a value that is not looked into.
  bool add_argument(const c10::IValue& value) {
    if (value.isTensor()) {
      add('t');
      add(value.toTensor());
    } else if (value.isTensorList()) {
      add('l');
      for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
    } else if (value.isOptionalTensorList()) {
      add('o');
      for (const auto& tensor : value.toOptionalTensorVector()) add(tensor.value_or(at::Tensor()));
    } else if (value.isNone()) {
      add('n');
    } else if (value.isInt()) {
      add('i');
      add(value.toInt());
    } else if (value.isDouble()) {
      add('d');
      add(value.toDouble());
    } else if (value.isBool()) {
      add('b');
      add(value.toBool());
    } else if (value.isIntList()) {
      add('v');
      add(c10::IntArrayRef(value.toIntVector()));
    } else if (value.isString()) {
      add('s');
      add(value.toStringView().size());
      bytes_ += value.toStringView();
    } else if (value.isDevice()) {
      add('D');
      add(value.toDevice().type());
    } else {
      return false;
    }
    return true;
  }

  const std::string& bytes() const { return bytes_; }

 private:
  void add(c10::IntArrayRef values) {
    add(values.size());
    bytes_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int64_t));
  }

  std::string bytes_;
};

Inferred run_on_meta(const c10::OperatorHandle& op, int generator, const Stack& arguments) {
  Inferred inferred;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;  // npu, meta
  const auto as_meta = [&](const at::Tensor& tensor) {
    // A number of the host stays one: its type counts for less.
    const bool is_number = tensor.defined() && tensor.device().is_cpu() && tensor.dim() == 0;
    tensors.emplace_back(tensor, is_number ? tensor : to_meta(tensor));
    return tensors.back().second;
  };
  Stack inputs;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (static_cast<int>(i) == generator) inputs.emplace_back();
    else inputs.push_back(on_device(with_tensors(arguments[i], as_meta), c10::kMeta));
  }
  inferred.returned = inputs;
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &inferred.returned);
  } catch (const std::exception&) {
    return inferred;  // the kernel for CPUs gives the result, or says better what is wrong
  }
  inferred.is_known = true;
  for (const auto& [npu, meta] : tensors) {
    const bool is_resized = npu.defined() && npu.sizes() != meta.sizes();
    inferred.resized.push_back(is_resized ? std::optional(meta.sizes().vec()) : std::nullopt);
  }
  return inferred;
}

}  // namespace

const Inferred& infer(const c10::OperatorHandle& op, int generator, const Stack& arguments) {
  thread_local std::unordered_map<std::string, Inferred> known;
  thread_local Inferred unknown;
  Signature signature;
  signature.add(&op.schema());
  bool is_whole = true;
  for (size_t i = 0; i < arguments.size() && is_whole; ++i)
    if (static_cast<int>(i) != generator) is_whole = signature.add_argument(arguments[i]);
  if (!is_whole) return unknown = run_on_meta(op, generator, arguments);
  auto found = known.find(signature.bytes());
  if (found == known.end()) {
    if (known.size() >= kMaxKnown) known.clear();
    found = known.emplace(signature.bytes(), run_on_meta(op, generator, arguments)).first;
  }
  return found->second;
}

}  // namespace emulated_npu
