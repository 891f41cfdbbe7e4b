// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Rotates keys to other positions while they are copied: the request, and its validated form.
//
// A rotary embedding turns pair i of a key at position p by p * frequency[i]. To move a key by d
// positions, turn pair i by d * frequency[i]; the position p does not matter. An embedding may also
// multiply keys by a factor (YaRN's attention factor). Stored keys contain this factor already, and
// the rotation does not change it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "kvext/checked_transfer.h"

namespace kvext {

enum class RowDtype : int64_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// The two elements of pair i, in a rotated part with n pairs.
enum class PairStyle : int64_t {
  kHalves = 0,     // i and n + i: NeoX
  kNeighbours = 1  // 2 * i and 2 * i + 1: GPT-J
};

// One plane whose rows are keys. A row consists of heads, and each head has a rotated part.
struct Rotation {
  static constexpr int64_t kColumns = 8;
  int64_t plane;
  RowDtype dtype;
  PairStyle pair_style;
  int64_t num_heads;
  int64_t head_bytes;    // a row has num_heads * head_bytes bytes
  int64_t offset_bytes;  // offset of the rotated part in a head
  int64_t num_pairs;
  int64_t first_frequency;  // the first of num_pairs entries of KeyRotation::frequencies
};

// The number of positions by which the keys of a group move.
struct Shift {
  static constexpr int64_t kColumns = 2;
  int64_t group;
  int64_t positions;
};

static_assert(sizeof(Rotation) == Rotation::kColumns * sizeof(int64_t));
static_assert(sizeof(Shift) == Shift::kColumns * sizeof(int64_t));

struct KeyRotation {
  Table<Rotation> rotations;  // all other planes move unchanged
  Table<Shift> shifts;        // ascending by group; one for every group that moves rotated planes
  const double* frequencies = nullptr;  // radians per position
  int64_t num_frequencies = 0;
};

// The rotated part of the heads of one plane.
struct HeadRotation {
  RowDtype dtype;
  PairStyle pair_style;
  int64_t head_bytes;
  int64_t offset_bytes;
  int64_t num_pairs;
  const float* cosines;  // num_pairs values each
  const float* sines;
};

// A way to rotate keys, chosen for the CPU at hand when the library is loaded.
struct RotationKernel {
  std::string name;
  // Moves num_heads consecutive heads, and rotates them in float32, whatever their dtype. Source
  // and destination need not be aligned, and must not overlap.
  void (*rotate)(uint8_t* destination, const uint8_t* source, int64_t num_heads,
                 const HeadRotation& head);
};

// The kernels of this CPU, the best first; the last one is always "plain".
const std::vector<RotationKernel>& rotation_kernels();

// Refers to the transfer that it was made from; the transfer must outlive it.
class CheckedRotation {
 public:
  // Throws DescriptorError; changes nothing but its own memory.
  CheckedRotation(const CheckedTransfer& transfer, const KeyRotation& rotation);
  CheckedRotation(const CheckedRotation&) = delete;
  CheckedRotation& operator=(const CheckedRotation&) = delete;

  const CheckedTransfer& transfer() const { return transfer_; }
  // How to rotate the rows of a plane, by its place in CheckedTransfer::plane_order; null if the
  // rows move unchanged.
  const HeadRotation* head_rotation(int64_t place) const {
    return places_[place] < 0 ? nullptr : &head_rotations_[places_[place]];
  }

 private:
  const CheckedTransfer& transfer_;
  // The cosines and sines, by positions, first frequency and number of pairs. Layers with the same
  // shift and frequencies share an entry.
  std::map<std::tuple<int64_t, int64_t, int64_t>, std::vector<float>> angles_;
  std::vector<HeadRotation> head_rotations_;
  std::vector<int64_t> places_;  // places_[place in plane_order]: index in head_rotations_, or -1
};

}  // namespace kvext
