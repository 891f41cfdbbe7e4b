// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>

#include "retained_request.h"

namespace kvext::retention {

namespace {

using nb::literals::operator""_a;

void require_block(const BlockFields& fields, const nb::handle block) {
  if (Py_TYPE(block.ptr()) != fields.type()) throw nb::type_error("expected blocks of the pool.");
}

/// Ids of those blocks from a place on that are free.
BlockIds ids_of_free(const RetainedCache& cache, const nb::list& blocks, std::size_t first) {
  const BlockFields& fields = cache.blocks.fields();
  BlockIds ids;
  for (std::size_t index = first; index < blocks.size(); ++index) {
    const nb::object block = blocks[index];
    require_block(fields, block);
    if (fields.is_queued(block.ptr())) ids.push_back(fields.id(block.ptr()));
  }
  return ids;
}

using ReasonTuple = std::tuple<std::int32_t, std::int32_t, std::int32_t>;

Reason reason_of(const ReasonTuple& reason) {
  return {static_cast<Origin>(std::get<0>(reason)), std::get<1>(reason), std::get<2>(reason)};
}

/// Methods of `UseRates` that take a reason as Python has it.
template <typename Result, typename... Rest>
auto by_reason(Result (UseRates::*method)(const Reason&, Rest...)) {
  return [method](UseRates& rates, const ReasonTuple& reason, Rest... rest) {
    return (rates.*method)(reason_of(reason), rest...);
  };
}

/// Reads what is described under a name into a field of its type.
template <typename Field>
void read(const nb::handle described, const char* name, Field& field) {
  field = nb::cast<Field>(described[name]);
}

Group read_group(const nb::handle described) {
  Group group;
  const nb::bytes suffix = nb::cast<nb::bytes>(described["key_suffix"]);
  group.keys.suffix.assign(suffix.c_str(), suffix.size());
  read(described, "hashes_per_block", group.keys.hashes_per_block);
  read(described, "hashes_in_key", group.keys.hashes_in_key);
  read(described, "block_tokens", group.block_tokens);
  read(described, "tables", group.tables);
  read(described, "num_cached", group.num_cached);
  read(described, "is_upstreams", group.is_upstreams);
  read(described, "is_state", group.is_state);
  read(described, "window_tokens", group.window_tokens);
  return group;
}

std::vector<Group> read_groups(const nb::list& described) {
  std::vector<Group> groups;
  for (const nb::handle one : described) groups.push_back(read_group(one));
  return groups;
}

Geometry read_geometry(const nb::handle described) {
  Geometry geometry;
  read(described, "unit_tokens", geometry.unit_tokens);
  read(described, "step_tokens", geometry.step_tokens);
  read(described, "steady_tokens", geometry.steady_tokens);
  read(described, "lag_tokens", geometry.lag_tokens);
  read(described, "grid_tokens", geometry.grid_tokens);
  read(described, "is_grid_wanted", geometry.is_grid_wanted);
  read(described, "has_states", geometry.has_states);
  read(described, "use_eagle", geometry.use_eagle);
  read(described, "hit_by_step", geometry.hit_by_step);
  read(described, "opening_by_unit", geometry.opening_by_unit);
  read(described, "full_tokens", geometry.full_tokens);
  using Pairs = std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>>;
  for (const auto& of_group : nb::cast<Pairs>(described["tails"])) {
    auto& tails = geometry.tails.emplace_back();
    for (const auto& [start, stop] : of_group) tails.push_back({start, stop});
  }
  return geometry;
}

/// Splits what is freed: blocks that are not cached, and those that are, needed ones first.
nb::tuple split_freed(const RetainedCache& cache, const nb::list& blocks) {
  const BlockFields& fields = cache.blocks.fields();
  nb::list uncached, cached, surplus;
  for (const nb::handle block : blocks) {
    require_block(fields, block);
    if (!fields.is_cached(block.ptr())) {
      if (!fields.is_null(block.ptr())) uncached.append(block);
    } else if (cache.tree.needs()[fields.id(block.ptr())]) {
      cached.append(block);
    } else {
      surplus.append(block);
    }
  }
  if (surplus.size()) cached.extend(surplus);
  return nb::make_tuple(uncached, cached, surplus.size());
}

/// All checkpoints, for tests and reports; takes time in proportion to their number.
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
    one["clock_pools"] = node->clock_pools;
    one["is_in_order"] = node->place.index >= 0;
    described.append(one);
  }
  return described;
}

void set_plan(RetainedRequest& request,
              const std::vector<std::tuple<std::int64_t, std::int32_t, std::int32_t>>& plan,
              std::vector<std::int64_t> stops_tokens, std::int64_t replay_tokens) {
  std::vector<PlannedBoundary> boundaries;
  for (const auto& [tokens, origin, step] : plan) {
    boundaries.push_back({tokens, Reason{static_cast<Origin>(origin), step, 0}});
  }
  request.set_plan(std::move(boundaries), std::move(stops_tokens), replay_tokens);
}

// An engine that is dropped is a circle, of which these are parts: the garbage collector has to be
// shown what they keep alive. What breaks it are upstream's objects.

int traverse_cache(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  for (const nb::handle held : nb::inst_ptr<RetainedCache>(self)->held()) Py_VISIT(held.ptr());
  return 0;
}

int traverse_request(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const RetainedRequest& request = *nb::inst_ptr<RetainedRequest>(self);
  Py_VISIT(request.request().ptr());
  Py_VISIT(nb::find(request.cache_of()).ptr());
  return 0;
}

PyType_Slot cache_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_cache)}, {0, nullptr}};
PyType_Slot request_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_request)},
                               {0, nullptr}};

}  // namespace

void bind(nb::module_& module) {
  nb::class_<RetainedCache>(module, "RetainedCache", nb::type_slots(cache_slots))
      .def(
          "__init__",
          [](RetainedCache* self, nb::list blocks, nb::object head, nb::object tail,
             nb::handle geometry, const nb::list& sparse_groups, const nb::list& full_groups,
             bool has_events) {
            new (self) RetainedCache(std::move(blocks), std::move(head), std::move(tail),
                                     read_geometry(geometry), read_groups(sparse_groups),
                                     read_groups(full_groups), has_events);
          },
          "blocks"_a, "head"_a, "tail"_a, "geometry"_a, "sparse_groups"_a, "full_groups"_a,
          "has_events"_a)
      .def("make_room",
           [](RetainedCache& self, std::int64_t num_blocks) { self.tree.make_room(num_blocks); })
      .def("clear", [](RetainedCache& self) { self.tree.clear(); })
      .def("split_freed", &split_freed)
      .def("note_surplus",
           [](RetainedCache& self, const nb::list& freed, std::size_t count) {
             const auto first = freed.size() - count;
             self.tree.free_order().note_appended(ids_of_free(self, freed, first));
           })
      .def("note_uncached",
           [](RetainedCache& self, const nb::list& freed) {
             self.tree.note_uncached(ids_of_free(self, freed, 0));
           })
      .def("num_needs",
           [](const RetainedCache& self, BlockId id) {
             if (id < 0 || static_cast<std::size_t>(id) >= self.blocks.size()) {
               throw nb::index_error("num_needs: there is no such block.");
             }
             return self.tree.needs()[id];
           })
      .def("surplus",
           [](RetainedCache& self) {
             FreeOrder& order = self.tree.free_order();
             return order.next_blocks(order.count_next(static_cast<std::int64_t>(self.blocks.size())));
           })
      .def("counts",
           [](const RetainedCache& self) {
             const CheckpointCounts& counts = self.tree.counts();
             return std::make_tuple(counts.checkpoints, counts.checkpoints_kept,
                                    counts.checkpoints_evicted, counts.junctions_hit);
           })
      .def_prop_ro("rates", [](RetainedCache& self) -> UseRates& { return self.tree.rates(); })
      .def_prop_ro("clock_pools",
                   [](const RetainedCache& self) { return self.tree.order().clock_pools(); })
      .def("describe", &describe_checkpoints);

  nb::class_<UseRates>(module, "UseRates")
      .def(nb::init<>())
      .def("is_worth_trying", by_reason(&UseRates::is_worth_trying))
      .def("expected_uses",
           [](const UseRates& self, const ReasonTuple& reason) {
             return self.expected_uses(reason_of(reason));
           })
      .def("uses_per_pool", by_reason(&UseRates::uses_per_pool))
      .def("count_eviction", by_reason(&UseRates::count_eviction))
      .def("note_age",
           [](UseRates& self, const ReasonTuple& reason, double age_pools, int seen_ages) {
             self.note_age(reason_of(reason), age_pools, seen_ages);
             return seen_ages;
           })
      .def("count_use", by_reason(&UseRates::count_use))
      .def("count_missed_use", by_reason(&UseRates::count_missed_use));

  nb::class_<RetainedRequest>(module, "RetainedRequest", nb::type_slots(request_slots))
      .def(nb::init<RetainedCache&, nb::object>(), nb::keep_alive<1, 2>(), "cache"_a, "request"_a)
      .def_ro("holds_blocks", &RetainedRequest::holds_blocks)
      .def_ro("boundary_tokens", &RetainedRequest::boundary_tokens)
      .def_ro("next_event_tokens", &RetainedRequest::next_event_tokens)
      .def_rw("cached_tokens", &RetainedRequest::cached_tokens)
      .def("admit", &RetainedRequest::admit)
      .def("find_shared", &RetainedRequest::find_shared)
      .def("find_evicted", &RetainedRequest::find_evicted)
      .def("want", &RetainedRequest::want)
      .def("set_plan", &set_plan)
      .def("next_stop_tokens", &RetainedRequest::next_stop_tokens)
      .def("cache", &RetainedRequest::cache)
      .def("before_skip", &RetainedRequest::before_skip)
      .def("release", &RetainedRequest::release)
      .def("held_blocks", &RetainedRequest::held_blocks);
}

}  // namespace kvext::retention
