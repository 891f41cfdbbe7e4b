// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"

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

GroupKeys keys_of(const nb::handle group) {
  const nb::bytes suffix = nb::cast<nb::bytes>(group.attr("key_suffix"));
  return {nb::cast<std::int64_t>(group.attr("hashes_per_block")),
          std::string(suffix.c_str(), suffix.size())};
}

void read_group(const nb::handle described, Group& group) {
  group.block_tokens = nb::cast<std::int64_t>(described.attr("block_tokens"));
  group.keys = keys_of(described);
  group.tables = nb::cast<nb::dict>(described.attr("tables"));
  group.num_cached = nb::cast<nb::dict>(described.attr("num_cached"));
  group.is_upstreams = nb::cast<bool>(described.attr("is_upstreams"));
}

std::vector<SparseGroup> read_sparse_groups(const nb::list& described) {
  std::vector<SparseGroup> groups;
  for (const nb::handle one : described) {
    SparseGroup& group = groups.emplace_back();
    read_group(one, group);
    group.is_state = nb::cast<bool>(one.attr("is_state"));
    group.window_tokens = nb::cast<std::int64_t>(one.attr("window_tokens"));
    group.new_keys = one.attr("new_keys");
  }
  return groups;
}

std::vector<Group> read_full_groups(const nb::list& described) {
  std::vector<Group> groups;
  for (const nb::handle one : described) read_group(one, groups.emplace_back());
  return groups;
}

Geometry read_geometry(const nb::handle described) {
  Geometry geometry;
  geometry.unit_tokens = nb::cast<std::int64_t>(described.attr("unit_tokens"));
  geometry.step_tokens = nb::cast<std::int64_t>(described.attr("step_tokens"));
  geometry.steady_tokens = nb::cast<std::int64_t>(described.attr("steady_tokens"));
  geometry.lag_tokens = nb::cast<std::int64_t>(described.attr("lag_tokens"));
  geometry.grid_tokens = nb::cast<std::int64_t>(described.attr("grid_tokens"));
  geometry.is_grid_wanted = nb::cast<bool>(described.attr("is_grid_wanted"));
  geometry.has_states = nb::cast<bool>(described.attr("has_states"));
  geometry.looks_ahead = nb::cast<bool>(described.attr("looks_ahead"));
  geometry.hit_by_step = nb::cast<std::vector<std::int64_t>>(described.attr("hit_by_step"));
  geometry.opening_by_unit =
      nb::cast<std::vector<std::int64_t>>(described.attr("opening_by_unit"));
  geometry.full_tokens =
      nb::cast<std::vector<std::vector<std::int64_t>>>(described.attr("full_tokens"));
  using Pairs = std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>>;
  for (const auto& of_group : nb::cast<Pairs>(described.attr("tails"))) {
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

/// The last `count` of blocks that were freed to the queue's end, those that are free.
void note_surplus(RetainedCache& cache, const nb::list& freed, std::size_t count) {
  if (count > freed.size()) {
    const std::string text = "note_surplus: expected at most all blocks, found " +
                             std::to_string(count) + " of " + std::to_string(freed.size()) + ".";
    throw nb::value_error(text.c_str());
  }
  cache.tree.free_order().note_appended(ids_of_free(cache, freed, freed.size() - count));
}

void note_uncached(RetainedCache& cache, const nb::list& freed) {
  cache.tree.note_uncached(ids_of_free(cache, freed, 0));
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

}  // namespace

void bind(nb::module_& module) {
  nb::class_<RetainedCache>(module, "RetainedCache")
      .def(
          "__init__",
          [](RetainedCache* self, nb::list blocks, nb::object head, nb::object tail,
             nb::handle geometry, const nb::list& sparse_groups, const nb::list& full_groups,
             bool skips_by_tokens, bool has_events) {
            new (self) RetainedCache(std::move(blocks), std::move(head), std::move(tail),
                                     read_geometry(geometry), read_sparse_groups(sparse_groups),
                                     read_full_groups(full_groups), skips_by_tokens, has_events);
          },
          "blocks"_a, "head"_a, "tail"_a, "geometry"_a, "sparse_groups"_a, "full_groups"_a,
          "skips_by_tokens"_a, "has_events"_a)
      .def("make_room",
           [](RetainedCache& self, std::int64_t num_blocks) { self.tree.make_room(num_blocks); })
      .def("clear", [](RetainedCache& self) { self.tree.clear(); })
      .def("split_freed", &split_freed)
      .def("note_surplus", &note_surplus)
      .def("note_uncached", &note_uncached)
      .def("is_worth_trying",
           [](RetainedCache& self, std::int32_t origin, std::int32_t step) {
             return self.tree.rates().is_worth_trying({static_cast<Origin>(origin), step, 0});
           })
      .def("uses_per_pool",
           [](RetainedCache& self, const ReasonTuple& reason, double age_pools) {
             return self.tree.rates().uses_per_pool(reason_of(reason), age_pools);
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
                                    counts.checkpoints_evicted, self.num_junctions_hit);
           })
      .def("reachable_tokens",
           [](const RetainedCache& self, std::int64_t limit_tokens) {
             return self.geometry.reachable_tokens(limit_tokens);
           })
      .def("opens_at_tokens",
           [](const RetainedCache& self, std::int64_t boundary_tokens) {
             return self.geometry.opens_at_tokens(boundary_tokens);
           })
      .def("tail",
           [](const RetainedCache& self, std::size_t index, std::int64_t boundary_tokens) {
             const std::int64_t block_tokens = self.sparse_groups.at(index).block_tokens;
             const Range tail = self.geometry.tail(index, block_tokens, boundary_tokens);
             return std::make_pair(tail.start, tail.stop);
           })
      .def("full_end_tokens",
           [](const RetainedCache& self, std::size_t index, std::int64_t boundary_tokens) {
             self.full_groups.at(index);
             return self.geometry.full_end_tokens(index, boundary_tokens);
           })
      .def_prop_ro("clock_pools",
                   [](const RetainedCache& self) { return self.tree.order().clock_pools(); })
      .def("describe", &describe_checkpoints);

  nb::class_<UseRates>(module, "UseRates")
      .def(nb::init<>())
      .def("is_worth_trying",
           [](UseRates& self, const ReasonTuple& reason) {
             return self.is_worth_trying(reason_of(reason));
           })
      .def("expected_uses",
           [](const UseRates& self, const ReasonTuple& reason) {
             return self.expected_uses(reason_of(reason));
           })
      .def("uses_per_pool",
           [](UseRates& self, const ReasonTuple& reason, double age_pools) {
             return self.uses_per_pool(reason_of(reason), age_pools);
           })
      .def("count_eviction",
           [](UseRates& self, const ReasonTuple& reason) {
             self.count_eviction(reason_of(reason));
           })
      .def("note_age",
           [](UseRates& self, const ReasonTuple& reason, double age_pools, int seen_ages) {
             self.note_age(reason_of(reason), age_pools, seen_ages);
             return seen_ages;
           })
      .def("count_use",
           [](UseRates& self, const ReasonTuple& reason, double age_pools, int seen_ages) {
             self.count_use(reason_of(reason), age_pools, seen_ages);
           })
      .def("count_missed_use",
           [](UseRates& self, const ReasonTuple& reason, double age_pools, int seen_ages) {
             self.count_missed_use(reason_of(reason), age_pools, seen_ages);
           });

  nb::class_<RetainedRequest>(module, "RetainedRequest")
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
