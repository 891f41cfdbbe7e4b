// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
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
  std::int64_t hashes_in_key = 1;  // how many of the block's last hashes form the key
  std::string suffix;  // the group id, which ends every key

  /// The key of a block.
  /// @param hashes  a list that must reach to the end of the block
  nb::object at(PyObject* hashes, std::int64_t block_index) const;

  /// The key of a block that is cached up to a hash, which may lie inside the block.
  /// @param hash_end  how many hashes of the prompt are cached
  /// @return no object if the list of hashes is shorter
  nb::object up_to(PyObject* hashes, std::int64_t hash_end) const;

  /// Checks that the hashes can form the key of a block.
  /// @throws std::out_of_range if the hashes do not reach to the end of the block
  /// @throws nb::type_error if a hash is not bytes
  void require(PyObject* hashes, std::int64_t block_index) const;

  /// Whether a request's hashes reach to the end of a block.
  bool reach(PyObject* hashes, std::int64_t block_index) const {
    return (block_index + 1) * hashes_per_block <= PyList_GET_SIZE(hashes);
  }
};

/// A KV cache group, with the tables of vLLM's manager for it.
struct Group {
  std::size_t geometry_index = 0;   // index in `Geometry::groups`
  std::int64_t block_tokens = 1;
  GroupKeys keys;
  nb::dict tables;                  // request id -> list of blocks
  nb::dict num_cached;              // request id -> number of cached blocks
  bool is_upstreams = true;         // vLLM's own manager class, whose rules are known
  bool is_quiet = false;            // no events or records of vLLM tell what it caches
  bool is_state = false;
  std::int64_t window_tokens = 0;   // window plus the tokens that rejected drafts may recompute
};

/// The value of a key, as a borrowed reference; null if there is none.
PyObject* value_of(const nb::handle dict, const nb::handle key);

/// The key table during one call: finds cached blocks by key, and adds blocks.
class KeyTable {
 public:
  /// @param table  ``BlockHashToBlockMap``; vLLM creates a new one when the cache is reset
  explicit KeyTable(nb::handle table);

  /// A cached block with this key, as a borrowed reference; null if there is none.
  PyObject* find(const nb::object& key) const;

  /// At most `limit` cached blocks with this key.
  std::vector<PyObject*> find_all(const nb::object& key, std::size_t limit) const;

  /// Adds a block that has this key.
  void insert(const nb::object& key, PyObject* block) const;

 private:
  nb::handle table_;
  nb::object cache_;
  bool is_dict_;
};

/// The state of retention for one block pool, shared by all requests of one engine.
struct RetainedCache {
  RetainedCache(nb::list blocks, nb::object head, nb::object tail, Geometry geometry,
                std::vector<Group> sparse_groups, std::vector<Group> full_groups,
                std::int64_t hash_block_tokens, bool hits_inside_blocks);

  Blocks blocks;
  Geometry geometry;
  std::vector<Group> sparse_groups, full_groups;
  CheckpointTree tree;
  std::int64_t hash_block_tokens;
  /// Whether a hit may end inside a block. Blocks then have keys for their first tokens, too.
  bool hits_inside_blocks;

  /// A group by its number in answers: all groups are numbered, the sparse groups first.
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
  /// @param hashes  a list with one hash per `hash_block_tokens` tokens
  std::string prefix_key(PyObject* hashes, std::int64_t num_tokens) const;

  /// The references for Python's cycle collector. Since vLLM 0.30 there is a cycle: a block refers
  /// to its pool, and the pool refers to this cache.
  std::vector<nb::handle> held() const;
};

}  // namespace kvext::retention
