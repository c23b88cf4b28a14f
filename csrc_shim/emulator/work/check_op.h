/* The checking mode: checks each operation before it runs. Called only in that mode. */
#ifndef OCP_EMULATOR_WORK_CHECK_OP_H
#define OCP_EMULATOR_WORK_CHECK_OP_H

#include "driver/driver.h"
#include "emulator/clock.h"
#include "emulator/op.h"

/* Checks the operation. A result other than CUDA_SUCCESS is the error with which the operation fails. */
CUresult emu_check_op(const emu_op *op, const emu_clock *clock);

#endif
