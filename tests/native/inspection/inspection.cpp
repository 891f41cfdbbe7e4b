// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Looks into the checkpoints of the package's compiled module: what tests compare with a model, and
// what the package itself has no use for.
//
// The objects are those of `vllm_ascend_kvext._native`. Both modules are built of the same headers
// and the same nanobind, so that each takes the other's objects.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "retention/retained_request.h"

namespace {

using namespace kvext::retention;
using nb::literals::operator""_a;

/// Origin, step and uses, and the number of paths if there are any.
using ReasonNumbers = std::vector<std::int32_t>;

Reason reason_of(const ReasonNumbers& reason) {
  return {static_cast<Origin>(reason.at(0)), reason.at(1), reason.at(2),
          reason.size() > 3 ? reason[3] : 0};
}

/// Methods of `UseRates` that take a reason as Python has it.
template <typename Result, typename... Rest>
auto by_reason(Result (UseRates::*method)(const Reason&, Rest...)) {
  return [method](UseRates& rates, const ReasonNumbers& reason, Rest... rest) {
    return (rates.*method)(reason_of(reason), rest...);
  };
}

/// How many runs and tails of checkpoints, and running requests, need a block.
std::int32_t count_needs(const RetainedCache& cache, BlockId id) {
  if (id < 0 || static_cast<std::size_t>(id) >= cache.blocks.size()) {
    throw nb::index_error("num_needs: there is no such block.");
  }
  return cache.tree.needs()[id];
}

/// Ids of the free blocks that nothing needs, in the order of their reallocation.
BlockIds list_surplus(const RetainedCache& cache) {
  const FreeOrder& order = cache.tree.free_order();
  return order.next_blocks(order.count_next(static_cast<std::int64_t>(cache.blocks.size())));
}

/// All checkpoints; takes time in proportion to their number.
nb::list describe_checkpoints(const RetainedCache& cache) {
  nb::list described;
  for (const auto& [key, node] : cache.tree.nodes()) {
    nb::dict one;
    one["key"] = nb::bytes(key.data(), key.size());
    one["boundary_tokens"] = node->boundary_tokens;
    one["parent_key"] = nb::bytes(node->parent->key.data(), node->parent->key.size());
    one["parent_tokens"] = node->parent->boundary_tokens;
    one["num_children"] = node->children.size();
    one["runs"] = node->runs;
    one["tail"] = node->tail;
    one["num_ahead"] = node->num_ahead;
    one["num_requests"] = node->num_requests;
    one["origin"] = static_cast<int>(node->origin);
    one["reason"] = std::make_tuple(static_cast<int>(node->reason.origin), node->reason.step,
                                    node->reason.uses);
    one["num_paths"] = cache.tree.judged(*node).num_paths;
    one["clock_pools"] = node->clock_pools;
    one["is_in_order"] = node->place.index >= 0;
    described.append(one);
  }
  return described;
}

}  // namespace

NB_MODULE(_kvext_inspection, module) {
  // It has the classes of the objects.
  nb::module_::import_("vllm_ascend_kvext._native");
  if (!nb::type<RetainedCache>().is_valid()) {
    throw nb::import_error(
        "_kvext_inspection: expected the nanobind that vllm_ascend_kvext._native was compiled with, "
        "found another one. Install the package again, and the newest nanobind.");
  }

  module.def("num_needs", &count_needs);
  module.def("surplus", &list_surplus);
  module.def("describe", &describe_checkpoints);
  module.def("clock_pools",
             [](const RetainedCache& cache) { return cache.tree.order().clock_pools(); });
  module.def("rates", [](RetainedCache& cache) -> UseRates& { return cache.tree.rates(); },
             nb::rv_policy::reference, nb::keep_alive<0, 1>());
  module.def("held_blocks", [](const RetainedRequest& request) { return request.held_blocks(); });

  nb::class_<UseRates>(module, "UseRates")
      .def(nb::init<>())
      .def("is_worth_trying", by_reason(&UseRates::is_worth_trying))
      .def("expected_uses",
           [](const UseRates& self, const ReasonNumbers& reason) {
             return self.expected_uses(reason_of(reason));
           })
      .def("uses_per_pool", by_reason(&UseRates::uses_per_pool))
      .def("count_eviction", by_reason(&UseRates::count_eviction))
      .def("note_age",
           [](UseRates& self, const ReasonNumbers& reason, double age_pools, int seen_ages) {
             self.note_age(reason_of(reason), age_pools, seen_ages);
             return seen_ages;
           })
      .def("count_use", by_reason(&UseRates::count_use))
      .def("count_missed_use", by_reason(&UseRates::count_missed_use));
}
