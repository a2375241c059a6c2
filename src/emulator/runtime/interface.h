#pragma once

// The interface between an emulated kernel and the library. The kernel's unit is compiled again for every
// configuration, so this is plain data without includes. The library does the work, through the Table.

namespace flash_attention::emulator {

struct Index3 {
  unsigned x, y, z;
};

/// Arithmetic of single lanes, as the wrappers count it.
struct Arithmetic {
  unsigned long fma_flops;  // two for each ptx::fma
  unsigned long special;    // exponentials, logarithms, reciprocals, roots, tanh
  unsigned long simple;     // maxima, minima, products, conversions to 16 bits
};

/// The facts that a CUDA thread can read about itself.
struct ThreadView {
  Index3 thread, block, block_dim, grid_dim;
  unsigned lane;
  unsigned cluster_rank;
  unsigned cluster_size;
  unsigned char* shared;  // the block's shared memory
  unsigned shared_bytes;
  Arithmetic* arithmetic;
};

/// Shared addresses begin here: 0 is never valid, and tiles that are aligned in memory are aligned in addresses.
constexpr unsigned shared_window = 1024;
/// Addresses of another block of the cluster carry its rank + 1 above these bits.
constexpr int cluster_rank_shift = 24;

/// Operations of all lanes of a warp together. Each lane delivers one operand; the last to arrive computes for all.
enum class WarpOp : int {
  sync,
  shuffle,
  vote,
  elect,
  ldmatrix,
  stmatrix,
  mma,
  wmma_load,
  wmma_multiply,
  wmma_store,
  tmem_alloc,
  tmem_relinquish,
  tmem_dealloc,
  tmem_load,
  tmem_store,
  tmem_wait_load,
  tmem_wait_store
};

enum class ShuffleMode : int { exclusive_or, index, up };
struct ShuffleOperand {
  ShuffleMode mode;
  int lane;
  unsigned value;  // replaced by the result
};

struct VoteOperand {
  bool predicate;
  unsigned lanes;
};

/// ldmatrix and stmatrix.
struct MatrixMoveOperand {
  int count;  // of 8x8 tiles
  bool transposed;
  unsigned row;  // shared address
  unsigned* tiles;
};

enum class MatrixType : int { float16, bfloat16, tf32, e4m3, e5m2 };
struct MultiplyOperand {
  MatrixType a_type, type;  // of A; of B
  float* D;
  const unsigned* A;
  const unsigned* B;
};

/// wmma fragments: element (row, column) of a 16 x 16 matrix is value row * 16 + column; a lane has 8 of them.
struct WmmaMoveOperand {
  unsigned tile;
  int stride;
  bool column_major;
  void* registers;
};

enum class Access : int { load_global, store_global, reduce_global, load_shared, store_shared };

/// One asynchronous warpgroup product, from the view of one of its 128 threads.
struct WgmmaOperand {
  int n;
  MatrixType type;  // of B; A has the same type, or e4m3 if it is in registers and B has 8 bits
  bool a_mn_major, b_mn_major;
  const unsigned* a_registers;  // null: by descriptor
  unsigned long long a_descriptor, b_descriptor;
  bool accumulate;
  float* D;
};

/// What a lane gives to an instruction of tensor memory.
struct TensorMemoryOperand {
  unsigned address;  // in tensor memory; alloc: in shared memory, where that address is written
  int columns;
  unsigned* registers;  // of a load; a store has taken its values when the warp has arrived
};

/// tcgen05.mma, as its one thread issues it.
struct TensorProductOperand {
  unsigned D;
  bool a_in_tensor_memory;
  unsigned a_address;
  unsigned long long a_descriptor, b_descriptor;
  unsigned shape;  // the instruction descriptor
  bool accumulate;
};

/// Copies of the bulk engine: a box if `map` is set, otherwise a run of bytes.
struct BulkOperand {
  unsigned shared;
  const void* global;
  const void* map;
  int rank;
  int coordinates[5];
  int bytes;
  unsigned barrier;
  unsigned multicast;  // one bit for each block of the cluster; 0: this block
  bool add;            // store: add floats instead of overwriting
};

/// The library's side. Every entry may suspend the calling thread. If it finds a mistake it does not return.
struct Table {
  void (*warp)(WarpOp op, void* operand);
  void (*barrier)(int id, int threads, bool wait);  // threads = 0: the whole block
  void (*cluster_barrier)(bool wait);

  void (*access_global)(Access access, const void* address, int bytes);
  /// Returns the address of the bytes. A store passes its value, and the library stores it. A plain access has no
  /// value.
  unsigned char* (*access_shared)(Access access, unsigned address, int bytes, const void* value);
  unsigned (*shared_address)(const void* pointer);
  void (*spin)();  // a load in a loop that waits for another block
  void (*fail)(const char* what);

  void (*copy_async)(unsigned shared, const void* global, int bytes, int valid);
  void (*copy_async_commit)();
  void (*copy_async_wait)(int pending);
  void (*copy_async_arrive)(unsigned mbarrier);

  void (*mbarrier_init)(unsigned address, int arrivals);
  void (*mbarrier_arrive)(unsigned address, int arrivals, int bytes);
  void (*mbarrier_init_fence)();
  bool (*mbarrier_test)(unsigned address, unsigned parity);
  void (*mbarrier_wait)(unsigned address, unsigned parity);

  void (*bulk_load)(const BulkOperand& operand);
  void (*bulk_store)(const BulkOperand& operand);
  void (*bulk_commit)();
  void (*bulk_wait)(int pending, bool read);
  void (*fence_proxy_async)();
  void (*store_async)(unsigned address, const void* value, int bytes, unsigned barrier);

  void (*wgmma)(const WgmmaOperand& operand);
  void (*wgmma_fence)();
  void (*wgmma_commit)();
  void (*wgmma_wait)(int pending);
  void (*tensor_product)(const TensorProductOperand& operand);
  void (*tensor_commit)(unsigned barrier);
  void (*tensor_fence)(bool after);
  void (*set_registers)(int count, bool increase);
  void (*path)(const char* name);  // a marked branch was taken
  void (*griddepcontrol_wait)();
};

}  // namespace flash_attention::emulator
