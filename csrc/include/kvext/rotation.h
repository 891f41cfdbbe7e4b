// SPDX-License-Identifier: Apache-2.0
// Keys that are rotated to other positions while they move, and what has been found valid of that.
//
// A rotary embedding turns pair i of a key at position p by p * frequency[i]. To move the key by d
// positions is therefore to turn it by d * frequency[i], wherever it was. A factor that the embedding
// has multiplied keys with (YaRN's attention factor) is in them already, and stays as it is.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "kvext/checked_transfer.h"

namespace kvext {

enum class RowDtype : int64_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// Which two elements are pair i, in a rotated part of n pairs.
enum class PairStyle : int64_t {
  kHalves = 0,     // i and n + i: NeoX
  kNeighbours = 1  // 2 * i and 2 * i + 1: GPT-J
};

// One plane whose rows are keys: heads behind each other, each with a rotated part.
struct Rotation {
  static constexpr int64_t kColumns = 8;
  int64_t plane;
  RowDtype dtype;
  PairStyle pair_style;
  int64_t num_heads;
  int64_t head_bytes;    // num_heads of them are a row
  int64_t offset_bytes;  // of the rotated part in a head
  int64_t num_pairs;
  int64_t first_frequency;  // of num_pairs
};

// The number of positions by which the keys of a transfer's group move.
struct Shift {
  static constexpr int64_t kColumns = 2;
  int64_t group;
  int64_t positions;
};

static_assert(sizeof(Rotation) == Rotation::kColumns * sizeof(int64_t));
static_assert(sizeof(Shift) == Shift::kColumns * sizeof(int64_t));

struct KeyRotation {
  Table<Rotation> rotations;  // planes that are not named move as they are
  Table<Shift> shifts;        // ascending; one for every group that moves rotated planes
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
  const float* cosines;  // num_pairs each
  const float* sines;
};

// A way to rotate keys, chosen for the CPU at hand when the library is loaded.
struct RotationKernel {
  std::string name;
  // Moves num_heads heads that follow each other, and rotates them on the way; in float32 whatever
  // their dtype. Neither side need be aligned; they have no byte in common.
  void (*rotate)(uint8_t* destination, const uint8_t* source, int64_t num_heads,
                 const HeadRotation& head);
};

// The kernels of this CPU, the best first; the last one is always "plain".
const std::vector<RotationKernel>& rotation_kernels();

// Refers to the transfer that it was made from, which must outlive it.
class CheckedRotation {
 public:
  // Throws DescriptorError; changes nothing but its own memory.
  CheckedRotation(const CheckedTransfer& transfer, const KeyRotation& rotation);
  CheckedRotation(const CheckedRotation&) = delete;
  CheckedRotation& operator=(const CheckedRotation&) = delete;

  const CheckedTransfer& transfer() const { return transfer_; }
  // How the rows of a place in CheckedTransfer::plane_order turn; null where they move as they are.
  const HeadRotation* head_rotation(int64_t place) const {
    return places_[place] < 0 ? nullptr : &head_rotations_[places_[place]];
  }

 private:
  const CheckedTransfer& transfer_;
  // Cosines and sines by positions, first frequency and pairs. They are computed once per shift, for
  // layers are nearly always alike.
  std::map<std::tuple<int64_t, int64_t, int64_t>, std::vector<float>> angles_;
  std::vector<HeadRotation> head_rotations_;
  std::vector<int64_t> places_;  // in head_rotations_, or -1
};

}  // namespace kvext
