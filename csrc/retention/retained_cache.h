// SPDX-License-Identifier: Apache-2.0
// One block pool, its groups and its checkpoints, as adaptive retention sees them.
#pragma once

#include <string>
#include <vector>

#include "checkpoint_tree.h"
#include "geometry.h"

namespace kvext::retention {

/// The keys under which a group's blocks are cached:
/// `vllm_ascend_kvext.prefix_cache.keys.GroupKeys`.
struct GroupKeys {
  std::int64_t hashes_per_block = 1;
  std::int64_t hashes_in_key = 1;  // the last ones of a block
  std::string suffix;  // the group id, as it ends every key

  /// The key of a block.
  /// @param hashes  a list; it has to reach to the end of the block
  nb::object at(PyObject* hashes, std::int64_t block_index) const;

  /// Refuses hashes of which no key of a block can be made.
  /// @throws std::out_of_range if they do not reach to the end of the block
  /// @throws nb::type_error if they are no bytes
  void require(PyObject* hashes, std::int64_t block_index) const;

  /// Whether a request's hashes reach to the end of a block.
  bool reach(PyObject* hashes, std::int64_t block_index) const {
    return (block_index + 1) * hashes_per_block <= PyList_GET_SIZE(hashes);
  }
};

/// A KV cache group and upstream's books about it.
struct Group {
  std::size_t geometry_index = 0;   // its place in `Geometry::groups`
  std::int64_t block_tokens = 1;
  GroupKeys keys;
  nb::dict tables;                  // request id -> list of blocks
  nb::dict num_cached;              // request id -> number of cached blocks
  bool is_upstreams = true;         // upstream's own manager: its rules are known
  bool is_quiet = false;            // no event and no books of upstream's tell what is cached
  bool is_state = false;
  std::int64_t window_tokens = 0;   // with what drafts may compute again
};

/// The value of a key, borrowed; null if there is none.
PyObject* value_of(const nb::handle dict, const nb::handle key);

/// The key table of one call: finds cached blocks under their keys, and adds more.
class KeyTable {
 public:
  /// @param table  ``BlockHashToBlockMap``; upstream makes a new one when the cache is reset
  explicit KeyTable(nb::handle table);

  /// One of the cached blocks with a key, borrowed; null if there is none.
  PyObject* find(const nb::object& key) const;

  /// At most `limit` cached blocks with a key.
  std::vector<PyObject*> find_all(const nb::object& key, std::size_t limit) const;

  /// Adds a block that has this key.
  void insert(const nb::object& key, PyObject* block) const;

 private:
  nb::handle table_;
  nb::object cache_;
  bool is_dict_;
};

/// Shared by all requests of one engine.
struct RetainedCache {
  RetainedCache(nb::list blocks, nb::object head, nb::object tail, Geometry geometry,
                std::vector<Group> sparse_groups, std::vector<Group> full_groups);

  Blocks blocks;
  Geometry geometry;
  std::vector<Group> sparse_groups, full_groups;
  CheckpointTree tree;

  /// Answers name a group by its place among all of them, the sparse ones first.
  /// @throws std::out_of_range if there is no such group
  const Group& group(std::size_t place) const {
    if (place < sparse_groups.size()) return sparse_groups[place];
    return full_groups.at(place - sparse_groups.size());
  }

  /// The blocks of a sparse group that a hit at a boundary reads.
  Range tail(const Group& group, std::int64_t boundary_tokens) const {
    return geometry.tail(group.geometry_index, group.block_tokens, boundary_tokens);
  }

  /// The chained hash of a request's first tokens.
  /// @param hashes  a list, with one for every so many tokens
  std::string prefix_key(PyObject* hashes, std::int64_t num_tokens) const;

  /// Objects of upstream's that it keeps alive, and that lead to others: since vLLM 0.30 a block leads
  /// to its pool, which has this cache.
  std::vector<nb::handle> held() const;
};

}  // namespace kvext::retention
