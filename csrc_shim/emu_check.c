/* The checking mode: what compute-sanitizer would find. */
#include "emu_fiber.h"

void emu_check_divergence(emu_cpu *cpu) { (void)cpu; }
void ocp_emu_check_load(ocp_emu_thread *thread, const void *address, uint32_t bytes) {
  (void)thread, (void)address, (void)bytes;
}
void ocp_emu_check_store(ocp_emu_thread *thread, const void *address, uint32_t bytes) {
  (void)thread, (void)address, (void)bytes;
}
void ocp_emu_check_atomic(ocp_emu_thread *thread, const void *address, uint32_t bytes) {
  (void)thread, (void)address, (void)bytes;
}
int ocp_emu_num_findings(void) { return 0; }
int ocp_emu_finding(int index, char *text, size_t text_bytes) {
  (void)index, (void)text, (void)text_bytes;
  return -1;
}
void ocp_emu_clear_findings(void) {
  for (uint32_t index = 0; index < EMU_MAX_DEVICES; index++)
    atomic_store(&emu.devices[index].error, CUDA_SUCCESS);
}
