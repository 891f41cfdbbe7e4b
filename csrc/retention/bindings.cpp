// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <unordered_set>

#include "retained_request.h"

namespace kvext::retention {

namespace {

using nb::literals::operator""_a;

void require_block(const BlockFields& fields, const nb::handle block) {
  if (Py_TYPE(block.ptr()) != fields.type()) throw nb::type_error("expected blocks of the pool.");
}

/// Leaves the last of equal ids. Two requests that copy the same block in one step hold it twice, and
/// vLLM frees both at once. The block is then in the free queue once.
void drop_repeated(BlockIds& ids) {
  std::unordered_set<BlockId> seen;
  BlockIds once;
  for (auto id = ids.rbegin(); id != ids.rend(); ++id) {
    if (seen.insert(*id).second) once.push_back(*id);
  }
  ids.assign(once.rbegin(), once.rend());
}

/// Ids of the free blocks in a list, starting at index `first`.
BlockIds ids_of_free(const RetainedCache& cache, const nb::list& blocks, std::size_t first) {
  const BlockFields& fields = cache.blocks.fields();
  BlockIds ids;
  for (std::size_t index = first; index < blocks.size(); ++index) {
    const nb::object block = blocks[index];
    require_block(fields, block);
    if (fields.is_queued(block.ptr())) ids.push_back(fields.id(block.ptr()));
  }
  if (cache.hits_inside_blocks) drop_repeated(ids);
  return ids;
}

// Structs that are read from Python objects by the names of their fields.

/// Reads the value under a name into a field of the field's type.
template <typename Field>
void read(const nb::handle described, const char* name, Field& field) {
  field = nb::cast<Field>(described[name]);
}

GroupTables read_group_tables(const nb::handle described) {
  GroupTables group;
  read(described, "is_state", group.is_state);
  read(described, "window_tokens", group.window_tokens);
  read(described, "full_tokens", group.full_tokens);
  using Pairs = std::vector<std::pair<std::int64_t, std::int64_t>>;
  for (const auto& [start, stop] : nb::cast<Pairs>(described["tails"])) {
    group.tails.push_back({start, stop});
  }
  return group;
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
  for (const nb::handle group : nb::cast<nb::list>(described["groups"])) {
    geometry.groups.push_back(read_group_tables(group));
  }
  return geometry;
}

/// The group id as it ends every key of the group: four bytes, the highest byte first.
std::string key_suffix(std::uint32_t group_id) {
  std::string suffix;
  for (int shift = 24; shift >= 0; shift -= 8) {
    suffix.push_back(static_cast<char>(group_id >> shift & 0xff));
  }
  return suffix;
}

/// Reads a `ManagedGroup` and the tables of vLLM's manager of the group.
Group read_group(const nb::handle managed, const Geometry& geometry,
                 std::int64_t hash_block_tokens) {
  Group group;
  const nb::object manager = managed.attr("manager");
  group.geometry_index = nb::cast<std::size_t>(managed.attr("geometry_index"));
  group.block_tokens = nb::cast<std::int64_t>(managed.attr("block_tokens"));
  group.is_upstreams = nb::cast<bool>(managed.attr("is_upstreams"));
  group.keys.hashes_per_block = group.block_tokens / hash_block_tokens;
  group.keys.hashes_in_key = nb::cast<std::int64_t>(managed.attr("hashes_in_key"));
  group.keys.suffix = key_suffix(nb::cast<std::uint32_t>(manager.attr("kv_cache_group_id")));
  group.tables = nb::cast<nb::dict>(manager.attr("req_to_blocks"));
  group.num_cached = nb::cast<nb::dict>(manager.attr("num_cached_block"));
  const GroupTables& tables = geometry.groups.at(group.geometry_index);
  group.is_state = tables.is_state;
  group.window_tokens = tables.window_tokens;
  // vLLM also keeps the tokens before a window that rejected drafts may compute again.
  const char* extra = "extra_retained_tokens";
  if (nb::hasattr(manager, extra)) {
    group.window_tokens += nb::cast<std::int64_t>(manager.attr(extra));
  }
  return group;
}

/// @param quiet  quiet[n]: whether group n is quiet
std::vector<Group> read_groups(const nb::handle managed, const Geometry& geometry,
                               std::int64_t hash_block_tokens, const std::vector<bool>& quiet) {
  std::vector<Group> groups;
  for (const nb::handle one : nb::iter(managed)) {
    groups.push_back(read_group(one, geometry, hash_block_tokens));
    groups.back().is_quiet = quiet.at(groups.size() - 1);
  }
  return groups;
}

// Boundaries as Python passes them: tokens, origin and step.

using BoundaryTuple = std::tuple<std::int64_t, std::int32_t, std::int32_t>;

std::vector<PlannedBoundary> read_plan(const std::vector<BoundaryTuple>& plan) {
  std::vector<PlannedBoundary> boundaries;
  for (const auto& [tokens, origin, step] : plan) {
    boundaries.push_back({tokens, Reason{static_cast<Origin>(origin), step, 0}});
  }
  return boundaries;
}

std::vector<BoundaryTuple> list_lasting(const Geometry& geometry,
                                        const std::vector<BoundaryTuple>& plan,
                                        std::int64_t after_tokens, std::int64_t upto_tokens) {
  std::vector<BoundaryTuple> listed;
  const auto is_grid_kept = [] { return true; };
  for (const PlannedBoundary& each : lasting_boundaries(geometry, read_plan(plan), after_tokens,
                                                        upto_tokens, is_grid_kept)) {
    listed.emplace_back(each.boundary_tokens, static_cast<std::int32_t>(each.reason.origin),
                        each.reason.step);
  }
  return listed;
}

// Answers to Python.

/// Splits freed blocks into uncached blocks and cached blocks, with needed blocks first.
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

/// Lists group, first block and stop of each run; None if there is no step.
nb::object list_runs(const std::optional<std::vector<GroupRun>>& runs) {
  if (!runs) return nb::none();
  nb::list listed;
  for (const GroupRun& run : *runs) {
    listed.append(nb::make_tuple(run.group, run.blocks.start, run.blocks.stop));
  }
  return listed;
}

// A dropped engine is a cycle of references, and these objects are part of it. These objects must
// show the garbage collector which objects they keep alive. vLLM's objects break the cycle.

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
  nb::class_<Geometry>(module, "Geometry")
      .def("__init__",
           [](Geometry* self, nb::handle tables) { new (self) Geometry(read_geometry(tables)); })
      .def("lasting_boundaries", &list_lasting, "plan"_a, "after_tokens"_a, "upto_tokens"_a);

  nb::class_<RetainedCache>(module, "RetainedCache", nb::type_slots(cache_slots))
      .def(
          "__init__",
          [](RetainedCache* self, nb::list blocks, nb::object head, nb::object tail,
             std::int64_t hash_block_tokens, const Geometry& geometry, nb::handle sparse_groups,
             nb::handle full_groups, const std::vector<bool>& quiet_sparse_groups,
             const std::vector<bool>& quiet_full_groups, bool hits_inside_blocks) {
            new (self) RetainedCache(
                std::move(blocks), std::move(head), std::move(tail), geometry,
                read_groups(sparse_groups, geometry, hash_block_tokens, quiet_sparse_groups),
                read_groups(full_groups, geometry, hash_block_tokens, quiet_full_groups),
                hash_block_tokens, hits_inside_blocks);
          },
          "blocks"_a, "head"_a, "tail"_a, "hash_block_tokens"_a, "geometry"_a, "sparse_groups"_a,
          "full_groups"_a, "quiet_sparse_groups"_a, "quiet_full_groups"_a,
          "hits_inside_blocks"_a = false)
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
      .def("counts", [](const RetainedCache& self) {
        const CheckpointCounts& counts = self.tree.counts();
        return std::make_tuple(counts.checkpoints, counts.checkpoints_kept,
                               counts.checkpoints_evicted, counts.junctions_hit);
      });

  nb::class_<RetainedRequest>(module, "RetainedRequest", nb::type_slots(request_slots))
      .def(nb::init<RetainedCache&, nb::object>(), nb::keep_alive<1, 2>(), "cache"_a, "request"_a)
      .def_ro("holds_blocks", &RetainedRequest::holds_blocks)
      .def_ro("next_event_tokens", &RetainedRequest::next_event_tokens)
      .def_rw("cached_tokens", &RetainedRequest::cached_tokens)
      .def("find_prefixes",
           [](const RetainedRequest& self, nb::handle key_table, std::int64_t hit_tokens,
              std::int64_t num_prompt_tokens) {
             return std::make_pair(self.find_shared(key_table, hit_tokens, num_prompt_tokens),
                                   self.find_evicted(hit_tokens, num_prompt_tokens));
           })
      .def("admit", &RetainedRequest::admit, "key_table"_a, "inner_tokens"_a = 0)
      .def("keep_inside",
           [](RetainedRequest& self, nb::handle key_table, std::int64_t tokens,
              std::int32_t origin, std::int32_t step,
              const std::vector<std::int64_t>& full_tokens) {
             return self.keep_inside(key_table, tokens,
                                     Reason{static_cast<Origin>(origin), step, 0}, full_tokens);
           })
      .def("plan",
           [](RetainedRequest& self, const std::vector<BoundaryTuple>& plan,
              const std::vector<std::pair<std::int32_t, std::int64_t>>& rungs,
              std::vector<std::int64_t> stops_tokens, std::int64_t replay_tokens) {
             std::vector<Rung> ladder;
             for (const auto& [step, tokens] : rungs) ladder.push_back({tokens, step});
             self.plan(read_plan(plan), ladder, std::move(stops_tokens), replay_tokens);
           })
      .def("next_stop_tokens", &RetainedRequest::next_stop_tokens)
      .def("begin_step",
           [](RetainedRequest& self, nb::handle key_table, std::int64_t num_computed_tokens,
              std::int64_t num_tokens) {
             return list_runs(self.begin_step(key_table, num_computed_tokens, num_tokens));
           })
      .def("begin_last_step",
           [](RetainedRequest& self, nb::handle key_table, std::int64_t computed_tokens,
              std::int64_t own_tokens) {
             return list_runs(self.begin_last_step(key_table, computed_tokens, own_tokens));
           })
      .def("cache_quiet_runs", &RetainedRequest::cache_quiet_runs)
      .def("end_step", &RetainedRequest::end_step)
      .def("end_last_step", &RetainedRequest::end_last_step)
      .def("settled_tokens", &RetainedRequest::settled_tokens)
      .def("before_skip", &RetainedRequest::before_skip, "total_tokens"_a, "is_settled"_a,
           "skipped_tokens"_a = std::vector<std::int64_t>());
}

}  // namespace kvext::retention
