// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Moves the runs of a transfer between pages and the host buffer, through the unified buffers of
// all vector cores. The kernel is made for many small, scattered runs, of any alignment and any
// size.
//
// The kernel knows only addresses: the transfer is validated before the launch.
#include "kernel_operator.h"
#include "work_table.h"

namespace kvext {

class PageTransfer {
 public:
  __aicore__ inline void Init(GM_ADDR table, AscendC::TPipe* pipe) {
    table_.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(table));
    num_tasks_ = table_.GetValue(kHeaderNumTasks);
    num_units_ = table_.GetValue(kHeaderNumUnits);
    is_store_ = table_.GetValue(kHeaderDirection) == kPagesToHost;
    pipe->InitBuffer(tiles_, kTilesInFlight, kTileBytes);
  }

  __aicore__ inline void Run() {
    if (num_tasks_ == 0) {
      return;
    }
    ReadTask(0);
    for (int64_t unit = AscendC::GetBlockIdx(); unit < num_units_;
         unit += AscendC::GetBlockNum()) {
      while (task_index_ + 1 < num_tasks_ && FirstUnitOf(task_index_ + 1) <= unit) {
        ReadTask(task_index_ + 1);
      }
      const int32_t num_pieces = FindPieces(unit - task_[kTaskFirstUnit]);
      if (num_pieces > 0) {
        Move(num_pieces);
      }
    }
  }

 private:
  // The part of one run that a unit moves: one range of bytes on either side.
  struct Piece {
    int64_t page_address;
    int64_t host_address;
    uint32_t num_bytes;
  };

  __aicore__ inline int64_t FirstUnitOf(int64_t index) {
    return table_.GetValue(kHeaderColumns + index * kTaskColumns + kTaskFirstUnit);
  }

  __aicore__ inline void ReadTask(int64_t index) {
    task_index_ = index;
    for (int64_t column = 0; column < kTaskColumns; ++column) {
      task_[column] = table_.GetValue(kHeaderColumns + index * kTaskColumns + column);
    }
  }

  // Fills pieces_ with the work of one unit of the task, and returns their number. It returns 0 if
  // every run ends before this unit's tile.
  __aicore__ inline int32_t FindPieces(int64_t unit) {
    const int64_t batch = unit / task_[kTaskTilesPerRun];
    const int64_t tile_begin = (unit - batch * task_[kTaskTilesPerRun]) * kTileBytes;
    const int64_t first_run = batch * task_[kTaskRunsPerUnit];
    int64_t runs_end = first_run + task_[kTaskRunsPerUnit];
    if (runs_end > task_[kTaskNumRuns]) {
      runs_end = task_[kTaskNumRuns];
    }
    const int64_t runs_at = kHeaderColumns + num_tasks_ * kTaskColumns;
    int32_t count = 0;
    for (int64_t run = first_run; run < runs_end; ++run) {
      const int64_t at = runs_at + (task_[kTaskFirstRun] + run) * kRunColumns;
      const int64_t bytes_left =
          table_.GetValue(at + kRunNumRows) * task_[kTaskRowBytes] - tile_begin;
      if (bytes_left <= 0) {
        continue;
      }
      Piece& piece = pieces_[count++];
      piece.page_address = task_[kTaskPageAddress] +
                           table_.GetValue(at + kRunPage) * task_[kTaskPageStride] +
                           table_.GetValue(at + kRunFirstRow) * task_[kTaskRowBytes] + tile_begin;
      piece.host_address = task_[kTaskHostAddress] +
                           table_.GetValue(at + kRunHostRow) * task_[kTaskRowBytes] + tile_begin;
      piece.num_bytes = static_cast<uint32_t>(bytes_left < kTileBytes ? bytes_left : kTileBytes);
    }
    return count;
  }

  // Each piece begins on a data block of the tile. The queue runs the reads into a tile before the
  // writes from it, and holds back the next reads until these writes are done.
  __aicore__ inline void Move(int32_t num_pieces) {
    AscendC::LocalTensor<uint8_t> tile = tiles_.AllocTensor<uint8_t>();
    uint32_t at = 0;
    for (int32_t i = 0; i < num_pieces; ++i) {
      const Piece& piece = pieces_[i];
      Read(tile[at], is_store_ ? piece.page_address : piece.host_address, piece.num_bytes);
      at += RoundUp(piece.num_bytes);
    }
    tiles_.EnQue(tile);
    tile = tiles_.DeQue<uint8_t>();
    at = 0;
    for (int32_t i = 0; i < num_pieces; ++i) {
      const Piece& piece = pieces_[i];
      Write(is_store_ ? piece.host_address : piece.page_address, tile[at], piece.num_bytes);
      at += RoundUp(piece.num_bytes);
    }
    tiles_.FreeTensor(tile);
  }

  __aicore__ inline void Read(const AscendC::LocalTensor<uint8_t>& to, int64_t from,
                              uint32_t num_bytes) {
    const AscendC::DataCopyExtParams shape{1, num_bytes, 0, 0, 0};
    const AscendC::DataCopyPadExtParams<uint8_t> no_padding{false, 0, 0, 0};
    AscendC::DataCopyPad(to, At(from, num_bytes), shape, no_padding);
  }

  __aicore__ inline void Write(int64_t to, const AscendC::LocalTensor<uint8_t>& from,
                               uint32_t num_bytes) {
    const AscendC::DataCopyExtParams shape{1, num_bytes, 0, 0, 0};
    AscendC::DataCopyPad(At(to, num_bytes), from, shape);
  }

  __aicore__ inline AscendC::GlobalTensor<uint8_t> At(int64_t address, uint32_t num_bytes) {
    AscendC::GlobalTensor<uint8_t> bytes;
    bytes.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(static_cast<uint64_t>(address)),
                          num_bytes);
    return bytes;
  }

  __aicore__ inline uint32_t RoundUp(uint32_t num_bytes) {
    constexpr uint32_t kBlock = static_cast<uint32_t>(kDataBlockBytes);
    return (num_bytes + kBlock - 1) / kBlock * kBlock;
  }

  AscendC::GlobalTensor<int64_t> table_;
  AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, kTilesInFlight> tiles_;
  int64_t num_tasks_ = 0;
  int64_t num_units_ = 0;
  bool is_store_ = false;
  int64_t task_index_ = 0;
  int64_t task_[kTaskColumns];
  Piece pieces_[kMaxRunsPerUnit];
};

}  // namespace kvext

extern "C" __global__ __aicore__ void kvext_page_transfer(GM_ADDR table) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  AscendC::TPipe pipe;
  kvext::PageTransfer transfer;
  transfer.Init(table, &pipe);
  transfer.Run();
}
