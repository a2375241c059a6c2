#include "emulator/instructions/table.h"

#include "emulator/checks/paths.h"
#include "emulator/instructions/mbarrier.h"
#include "emulator/instructions/memory_ops.h"
#include "emulator/instructions/warp_ops.h"
#include "emulator/machine/address.h"

namespace flash_attention::emulator {

const Table& runtime_table() {
  static constexpr Table table{
      .warp = warp_op,
      .barrier = barrier,
      .cluster_barrier = cluster_barrier,
      .access_global = access_global,
      .access_shared = access_shared,
      .shared_address = address_of,
      .spin = spin,
      .fail = [](const char* what) { Scheduler::current().fail(what); },
      .copy_async = copy_async,
      .copy_async_commit = copy_async_commit,
      .copy_async_wait = copy_async_wait,
      .copy_async_arrive = copy_async_arrive,
      .mbarrier_init = mbarrier_init,
      .mbarrier_arrive = mbarrier_arrive,
      .mbarrier_init_fence = mbarrier_init_fence,
      .mbarrier_test = mbarrier_test,
      .mbarrier_wait = mbarrier_wait,
      .bulk_load = bulk_load,
      .bulk_store = bulk_store,
      .bulk_commit = bulk_commit,
      .bulk_wait = bulk_wait,
      .fence_proxy_async = fence_proxy_async,
      .store_async = store_async,
      .wgmma = wgmma,
      .wgmma_fence = wgmma_fence,
      .wgmma_commit = wgmma_commit,
      .wgmma_wait = wgmma_wait,
      .tensor_product = tensor_product,
      .tensor_commit = tensor_commit,
      .tensor_fence = tensor_fence,
      .set_registers = set_registers,
      .path = take_path,
      .griddepcontrol_wait = griddepcontrol_wait,
  };
  return table;
}

}  // namespace flash_attention::emulator
