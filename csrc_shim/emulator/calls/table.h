/* The driver table of the emulated devices. */
#ifndef OCP_EMULATOR_CALLS_TABLE_H
#define OCP_EMULATOR_CALLS_TABLE_H

#include "driver/driver.h"

/* The emulated devices, as configured (emulator.h). Never NULL. */
const ocp_driver *ocp_driver_emulator(void);

#endif
